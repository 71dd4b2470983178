// Writes rows into an array in place on the CPU: an XLA custom call whose output is its input.

#include <cstdint>
#include <cstring>

#include "ffi.h"

namespace {

// out = array, except that its row number place[i] is rows[i]; numbers out of range are skipped.
ffi::Error put_rows(ffi::AnyBuffer array, ffi::Buffer<ffi::S32, 1> place, ffi::AnyBuffer rows,
                    ffi::Result<ffi::AnyBuffer> out) {
  const int64_t count = place.element_count();
  if (count == 0 || rows.size_bytes() % count || rows.element_type() != array.element_type())
    return ffi::Error::InvalidArgument("put_rows: rows do not fit place and array");
  const int64_t size = rows.size_bytes() / count;
  const int64_t num_rows = array.size_bytes() / size;
  char* to = static_cast<char*>(out->untyped_data());
  const char* from = static_cast<const char*>(rows.untyped_data());
  if (to != array.untyped_data()) std::memcpy(to, array.untyped_data(), array.size_bytes());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = place.typed_data()[i];
    if (at >= 0 && at < num_rows) std::memcpy(to + at * size, from + i * size, size);
  }
  return ffi::Error::Success();
}

}  // namespace

HANDLER(PutRows, put_rows)

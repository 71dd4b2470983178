// Fills an array with zeros without touching its memory: whole pages of the operating system are
// given back, and read as zeros until something is written to them.

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The allocator's memory is private and anonymous. Linux alone promises that such pages are zeros
// after MADV_DONTNEED.
ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* const begin = static_cast<char*>(out->untyped_data());
  char* const end = begin + out->size_bytes();
#if defined(__linux__)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (first < last && madvise(first, last - first, MADV_DONTNEED) == 0) {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
    return ffi::Error::Success();
  }
#endif
  std::memset(begin, 0, end - begin);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Zeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

// Columns of a weight in panels (panels.cc), as float32 rows: the embeddings of tokens.

#include <cstdint>
#include <cstring>

#include "ffi.h"

namespace {

constexpr int kPanel = 48;  // columns; panels.py has the same number

// y[i] = column index[i] of the weight; zeros if there is none.
ffi::Error panel_columns(ffi::AnyBuffer panels, ffi::Buffer<ffi::S32, 1> index,
                         ffi::Result<ffi::Buffer<ffi::F32, 2>> y) {
  const auto sizes = panels.dimensions();  // [panels, k, kPanel], or [panels, k / 2, 2 kPanel]
  const bool is_paired = panels.element_type() == ffi::BF16;
  const int64_t depth = sizes[1], k = y->dimensions()[1], columns = sizes[0] * kPanel;
  if (k != depth * (is_paired ? 2 : 1) || sizes[2] != kPanel * (is_paired ? 2 : 1) ||
      y->dimensions()[0] != index.element_count())
    return ffi::Error::InvalidArgument("panel_columns: the panels do not fit index and y");
  float* to = y->typed_data();
  for (int64_t i = 0; i < index.element_count(); ++i, to += k) {
    const int64_t column = index.typed_data()[i];
    if (column < 0 || column >= columns) {
      std::memset(to, 0, k * sizeof(float));
      continue;
    }
    const int64_t first = column / kPanel * depth * kPanel + column % kPanel;
    const uint32_t* from = static_cast<const uint32_t*>(panels.untyped_data()) + first;
    for (int64_t row = 0; row < depth; ++row, from += kPanel) {
      if (is_paired) {
        const uint32_t both[] = {*from << 16, *from & 0xffff0000u};
        std::memcpy(to + 2 * row, both, sizeof(both));
      } else {
        std::memcpy(to + row, from, sizeof(*from));
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

HANDLER(PanelColumns, panel_columns)

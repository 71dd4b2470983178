// The rows of a product that are computed: a batch has others to pad it, or that have ended.

#ifndef PALLAS_KERNELS_COMPUTED_ROWS_H_
#define PALLAS_KERNELS_COMPUTED_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi.h"

using Computed = ffi::Buffer<ffi::PRED, 1>;  // whether each row is computed; empty if all are

// Its memory is the calling thread's, and serves until the thread's next product.
class ComputedRows {
 public:
  explicit ComputedRows(int64_t rows) : all_(rows), count_(rows) {}

  ComputedRows(const Computed& computed, int64_t rows) : ComputedRows(rows) {
    const bool* is_computed = computed.typed_data();
    if (computed.element_count() != rows) return;
    count_ = std::count(is_computed, is_computed + rows, true);
    is_computed_ = is_computed;
    if (std::all_of(is_computed, is_computed + count_, [](bool each) { return each; })) return;
    static thread_local std::vector<int64_t> places;
    places.clear();
    for (int64_t row = 0; row < rows; ++row)
      if (is_computed[row]) places.push_back(row);
    places_ = places.data();
  }

  int64_t count() const { return count_; }

  // The place in the batch of the computed row `i`.
  int64_t operator[](int64_t i) const { return places_ ? places_[i] : i; }

  // Returns the computed rows of x [rows, k], one after the other.
  const float* of(const float* x, int64_t k) const {
    if (!places_) return x;
    static thread_local std::vector<float> together;
    together.resize(count_ * k);
    for (int64_t i = 0; i < count_; ++i) std::copy_n(x + places_[i] * k, k, &together[i * k]);
    return together.data();
  }

  // Fills the other rows of y [rows, n] with zeros.
  void clear_others(float* y, int64_t n) const {
    if (count_ == all_) return;
    for (int64_t row = 0; row < all_; ++row)
      if (!is_computed_[row]) std::fill_n(y + row * n, n, 0.0f);
  }

 private:
  int64_t all_, count_;
  const bool* is_computed_ = nullptr;
  const int64_t* places_ = nullptr;  // null if the first rows are computed
};

#endif  // PALLAS_KERNELS_COMPUTED_ROWS_H_

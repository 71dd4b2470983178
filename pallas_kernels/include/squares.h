// Products of 16 rows of int8 activations with a panel of codes, by the matrix instructions of AMX.
//
// HAS_SQUARES: the compiler's target has them. Linux must also permit their registers to a process:
// `may_use_squares`. NO_SQUARES leaves them out, so that tests compare with other instructions.

#ifndef PALLAS_KERNELS_SQUARES_H_
#define PALLAS_KERNELS_SQUARES_H_

#include <cstdint>

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__) && \
    !defined(PORTABLE) && !defined(NO_SQUARES)
#define HAS_SQUARES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t kSquareDepth = 64;  // maximum of activations of a row in one instruction
// Minimum of rows for which they are faster, with codes of four and of eight bits.
constexpr int64_t kSquaresFrom4 = 16, kSquaresFrom8 = 64;

// Whether the kernel lets this process use the registers. It is asked once.
inline bool may_use_squares() {
  static const bool may = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return may;
}

// The shapes of this thread's registers: sums in 0 and 1, activations in 2 and 3, codes in 4 and 5.
// Released at the end, since a thread that holds them is slower to switch to.
class SquareConfig {
 public:
  explicit SquareConfig(int depth) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 2; ++i) {
      shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
      shapes.rows[2 + i] = 16, shapes.row_bytes[2 + i] = depth;
      shapes.rows[4 + i] = depth / 4, shapes.row_bytes[4 + i] = 64;
    }
    _tile_loadconfig(&shapes);
  }
  ~SquareConfig() { _tile_release(); }
  SquareConfig(const SquareConfig&) = delete;
  SquareConfig& operator=(const SquareConfig&) = delete;
};

// to[r][c] = sum over a group of x[r][k] * codes[k / 4][c][k % 4], for 16 rows of x.
// `set` says which registers are used; their numbers must be literals.
template <int set>
inline __attribute__((always_inline)) void multiply_square(const int8_t* x, int64_t stride,
                                                           const uint8_t* codes, int64_t step,
                                                           int64_t group, void* to) {
  if constexpr (set == 0) {
    _tile_zero(0);
    for (int64_t k = 0; k < group; k += step) {
      _tile_loadd(2, x + k, stride);
      _tile_loadd(4, codes + k * 16, 64);
      _tile_dpbsud(0, 2, 4);
    }
    _tile_stored(0, to, 64);
  } else {
    _tile_zero(1);
    for (int64_t k = 0; k < group; k += step) {
      _tile_loadd(3, x + k, stride);
      _tile_loadd(5, codes + k * 16, 64);
      _tile_dpbsud(1, 3, 5);
    }
    _tile_stored(1, to, 64);
  }
}

#endif

#endif  // PALLAS_KERNELS_SQUARES_H_

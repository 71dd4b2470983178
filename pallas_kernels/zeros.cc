// Fills an array with zeros without touching its memory: whole pages of the operating system are
// given back, and read as zeros until something is written to them. All but the beginning of a
// large array is written in huge pages, which take fewer translations of addresses to read.

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "ffi.h"

namespace {

constexpr uintptr_t kHuge = 2 << 20;
// Bytes at the beginning in small pages, so that little memory is taken for little that is written.
constexpr uintptr_t kInSmallPages = 1 << 20;

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
#if defined(MADV_HUGEPAGE)
    const uintptr_t huge = (reinterpret_cast<uintptr_t>(begin) + kInSmallPages + kHuge - 1) / kHuge * kHuge;
    const uintptr_t end_of_huge = reinterpret_cast<uintptr_t>(end) / kHuge * kHuge;
    // Best effort: a system without huge pages refuses.
    if (huge < end_of_huge) madvise(reinterpret_cast<void*>(huge), end_of_huge - huge, MADV_HUGEPAGE);
#endif
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
    return ffi::Error::Success();
  }
#endif
  std::memset(begin, 0, end - begin);
  return ffi::Error::Success();
}

}  // namespace

HANDLER(Zeros, zeros)

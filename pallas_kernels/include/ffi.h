// What the kernels use of XLA's custom calls: a layer over the C interface of jaxlib's headers, whose
// own layer for C++ takes more than a second of every file's compilation. Names are as there.
//
// A kernel is a function of a thread pool (if it wants one), buffers, results and attributes, in this
// order, that returns an Error. HANDLER(Symbol, kernel, "attribute"...) makes it callable by XLA.

#ifndef PALLAS_KERNELS_FFI_H_
#define PALLAS_KERNELS_FFI_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace ffi {

using DataType = XLA_FFI_DataType;
constexpr DataType PRED = XLA_FFI_DataType_PRED;
constexpr DataType U8 = XLA_FFI_DataType_U8;
constexpr DataType S8 = XLA_FFI_DataType_S8;
constexpr DataType S16 = XLA_FFI_DataType_S16;
constexpr DataType S32 = XLA_FFI_DataType_S32;
constexpr DataType S64 = XLA_FFI_DataType_S64;
constexpr DataType F16 = XLA_FFI_DataType_F16;
constexpr DataType BF16 = XLA_FFI_DataType_BF16;
constexpr DataType F32 = XLA_FFI_DataType_F32;
constexpr DataType F8E4M3FN = XLA_FFI_DataType_F8E4M3FN;

// The C++ type of an element, where C++ has one, and its dtype.
template <DataType type>
struct Element { using Type = void; };
template <>
struct Element<PRED> { using Type = bool; };
template <>
struct Element<U8> { using Type = uint8_t; };
template <>
struct Element<S32> { using Type = int32_t; };
template <>
struct Element<F32> { using Type = float; };

template <typename T>
constexpr DataType kTypeOf = XLA_FFI_DataType_INVALID;
template <>
constexpr DataType kTypeOf<float> = F32;
template <>
constexpr DataType kTypeOf<bool> = PRED;
template <>
constexpr DataType kTypeOf<int32_t> = S32;
template <>
constexpr DataType kTypeOf<int64_t> = S64;

constexpr int64_t bytes_of(DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E5M2:
      return 1;
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 0;  // refused, see Reader
  }
}

class Error {
 public:
  static Error Success() { return Error(""); }
  static Error InvalidArgument(std::string message) { return Error(std::move(message)); }
  bool failure() const { return !message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  explicit Error(std::string message) : message_(std::move(message)) {}
  std::string message_;
};

template <typename T>
class Span {
 public:
  Span(T* data, int64_t size) : data_(data), size_(size) {}
  T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  T* data_;
  int64_t size_;
};

class AnyBuffer {
 public:
  explicit AnyBuffer(const XLA_FFI_Buffer* buffer) : buffer_(buffer) {}
  DataType element_type() const { return buffer_->dtype; }
  Span<const int64_t> dimensions() const { return {buffer_->dims, buffer_->rank}; }
  void* untyped_data() const { return buffer_->data; }
  int64_t element_count() const {
    int64_t count = 1;
    for (const int64_t size : dimensions()) count *= size;
    return count;
  }
  int64_t size_bytes() const { return element_count() * bytes_of(element_type()); }

  static bool is(const XLA_FFI_Buffer& buffer) { return bytes_of(buffer.dtype) != 0; }

 private:
  const XLA_FFI_Buffer* buffer_;
};

constexpr int64_t kAnyRank = -1;

template <DataType type, int64_t rank = kAnyRank>
class Buffer : public AnyBuffer {
 public:
  using AnyBuffer::AnyBuffer;
  typename Element<type>::Type* typed_data() const {
    return static_cast<typename Element<type>::Type*>(untyped_data());
  }

  static bool is(const XLA_FFI_Buffer& buffer) {
    return buffer.dtype == type && (rank == kAnyRank || buffer.rank == rank);
  }
};

// An output.
template <typename B>
class Result {
 public:
  explicit Result(B buffer) : buffer_(buffer) {}
  B* operator->() { return &buffer_; }
  B& operator*() { return buffer_; }

 private:
  B buffer_;
};

// XLA's own threads.
class ThreadPool {
 public:
  using Context = decltype(XLA_FFI_CallFrame::ctx);  // whose name is another in some versions

  ThreadPool(const XLA_FFI_Api* api, Context context)
      : api_(api), context_(context) {}

  // Runs `task` on a thread of the pool, or on this one if there is no pool.
  template <typename Task>
  void Schedule(Task task) {
    Task* const held = new Task(std::move(task));
    XLA_FFI_Task* const run = [](void* data) {
      Task* const task = static_cast<Task*>(data);
      (*task)();
      delete task;
    };
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.task = run;
    args.data = held;
    if (ignored(api_->XLA_FFI_ThreadPool_Schedule(&args))) run(held);
  }

  int64_t num_threads() const {
    int64_t num = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.num_threads = &num;
    return ignored(api_->XLA_FFI_ThreadPool_NumThreads(&args)) ? 0 : num;
  }

 private:
  // Whether there was an error, which is destroyed.
  bool ignored(XLA_FFI_Error* error) const {
    if (!error) return false;
    XLA_FFI_Error_Destroy_Args args{};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    api_->XLA_FFI_Error_Destroy(&args);
    return true;
  }

  const XLA_FFI_Api* api_;
  Context context_;
};

// Reads the parameters of a kernel from a call, one after another, and notes what does not fit.
class Reader {
 public:
  Reader(const XLA_FFI_CallFrame* call, const char* const* names) : call_(call), names_(names) {}

  template <typename T>
  T read() {
    if constexpr (std::is_same_v<T, ThreadPool>) return ThreadPool(call_->api, call_->ctx);
    else return read_as(static_cast<T*>(nullptr));
  }

  // What does not fit; "" if everything was read and fits.
  std::string problem() const {
    if (problem_.empty() && (num_args_ != call_->args.size || num_rets_ != call_->rets.size))
      return "the number of operands or results does not match the kernel";
    return problem_;
  }

 private:
  // A buffer or a result.
  template <typename B>
  Result<B> read_as(Result<B>*) {
    return Result<B>(buffer<B>(call_->rets.rets, call_->rets.size, num_rets_++, "result "));
  }
  template <DataType type, int64_t rank>
  Buffer<type, rank> read_as(Buffer<type, rank>*) {
    return buffer<Buffer<type, rank>>(call_->args.args, call_->args.size, num_args_++, "operand ");
  }
  AnyBuffer read_as(AnyBuffer*) {
    return buffer<AnyBuffer>(call_->args.args, call_->args.size, num_args_++, "operand ");
  }
  // An attribute.
  template <typename T>
  Span<const T> read_as(Span<const T>*) {
    static_assert(kTypeOf<T> != XLA_FFI_DataType_INVALID);
    const auto* array = static_cast<const XLA_FFI_Array*>(attribute(XLA_FFI_AttrType_ARRAY));
    if (array && array->dtype == kTypeOf<T>)
      return {static_cast<const T*>(array->data), static_cast<int64_t>(array->size)};
    note(std::string("attribute ") + names_[-1]);
    return {nullptr, 0};
  }
  template <typename T>
  T read_as(T*) {
    static_assert(kTypeOf<T> != XLA_FFI_DataType_INVALID);
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attribute(XLA_FFI_AttrType_SCALAR));
    if (scalar && scalar->dtype == kTypeOf<T>) return *static_cast<const T*>(scalar->value);
    note(std::string("attribute ") + names_[-1]);
    return T{};
  }

  template <typename B>
  B buffer(void** all, int64_t size, int64_t i, const char* what) {
    static const XLA_FFI_Buffer none{};
    const auto* found = i < size ? static_cast<const XLA_FFI_Buffer*>(all[i]) : nullptr;
    if (found && B::is(*found)) return B(found);
    note(what + std::to_string(i));
    return B(&none);
  }

  // The attribute of the next name; null if there is none of this kind.
  const void* attribute(XLA_FFI_AttrType kind) {
    const char* const name = *names_++;
    const XLA_FFI_Attrs& attrs = call_->attrs;
    for (int64_t i = 0; i < attrs.size; ++i)
      if (attrs.types[i] == kind && attrs.names[i]->len == std::strlen(name) &&
          std::memcmp(attrs.names[i]->ptr, name, attrs.names[i]->len) == 0)
        return attrs.attrs[i];
    return nullptr;
  }

  void note(const std::string& what) {
    if (problem_.empty()) problem_ = what + " is missing, or its dtype or rank does not match";
  }

  const XLA_FFI_CallFrame* call_;
  const char* const* names_;
  int64_t num_args_ = 0, num_rets_ = 0;
  std::string problem_;
};

inline XLA_FFI_Error* error_of(const XLA_FFI_Api* api, const std::string& message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message.c_str();
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return api->XLA_FFI_Error_Create(&args);
}

// Whether XLA asks for the version of its interface only, which is then told.
inline bool is_about_version(XLA_FFI_CallFrame* call) {
  for (auto* each = call->extension_start; each; each = each->next)
    if (each->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata* about = reinterpret_cast<XLA_FFI_Metadata_Extension*>(each)->metadata;
      about->api_version.major_version = XLA_FFI_API_MAJOR;
      about->api_version.minor_version = XLA_FFI_API_MINOR;
      about->traits = 0;
#if defined(XLA_FFI_UNKNOWN_TYPE_ID)
      about->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
#endif
      return true;
    }
  return false;
}

template <typename... Parameters>
XLA_FFI_Error* call_kernel(XLA_FFI_CallFrame* call, Error (*kernel)(Parameters...),
                           const char* symbol, const char* const* names) {
  if (is_about_version(call)) return nullptr;
  Reader reader(call, names);
  std::tuple<Parameters...> parameters{reader.read<Parameters>()...};  // in order, in braces
  if (const std::string problem = reader.problem(); !problem.empty())
    return error_of(call->api, std::string(symbol) + ": " + problem);
  const Error error = std::apply(kernel, std::move(parameters));
  return error.failure() ? error_of(call->api, error.message()) : nullptr;
}

}  // namespace ffi

// Defines the function `symbol`, which XLA calls; the names of `kernel`'s attributes come last.
#define HANDLER(symbol, kernel, ...)                                       \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol( \
      XLA_FFI_CallFrame* call) {                                           \
    static constexpr const char* names[] = {"", __VA_ARGS__};              \
    return ffi::call_kernel(call, kernel, #symbol, names + 1);             \
  }

#endif  // PALLAS_KERNELS_FFI_H_

// The process-group backend: gloo moves the data between processes, through copies on the host.
//
// A result reaches its device tensor only when its work is waited for, or when somebody asked for its future. On
// hardware, reading before that gives whatever is there; here it gives the old values, so a forgotten wait shows.
#include "flavour.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace sim {

using c10d::Backend;
using c10d::OpType;
using c10d::Work;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
template <typename T>
using Ptr = c10::intrusive_ptr<T>;

#define SIM_STRING_(name) #name
#define SIM_STRING(name) SIM_STRING_(name)

// -- faults: set from Python ----------------------------------------------------------------------------------

struct Fault {
  std::string kind; // "" for none
  int64_t call = 0; // 0 for every one
  int64_t rank = -1; // -1 for all
  double seconds = 0;
};

static std::mutex fault_mutex;
static Fault fault;
static int64_t calls = 0;

static void set_fault(const std::string& kind, int64_t call, int64_t rank, double seconds) {
  std::lock_guard<std::mutex> lock(fault_mutex);
  fault = {kind, call, rank, seconds};
  calls = 0;
}

static std::atomic<bool> averages{true};

static int64_t collectives() {
  std::lock_guard<std::mutex> lock(fault_mutex);
  return calls;
}

// What goes wrong with the collective that is being called, and its number.
static std::pair<Fault, int64_t> next_call(int64_t global_rank) {
  std::lock_guard<std::mutex> lock(fault_mutex);
  ++calls;
  const bool applies = (fault.call == 0 || fault.call == calls) && (fault.rank < 0 || fault.rank == global_rank);
  return {applies ? fault : Fault{}, calls};
}

// -- staging --------------------------------------------------------------------------------------------------

template <typename Signature>
static auto device_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string(SIM_STRING(SIM_NAMESPACE)) + "::" + name).c_str(), "")
      .typed<Signature>();
}

// A device tensor and its copy on the host.
struct Staged {
  at::Tensor device;
  at::Tensor host; // of the same strides

  at::Tensor flat() const { // gloo takes the memory in one piece, whatever its order
    return host.as_strided({host.numel()}, {1});
  }

  void deliver() const {
    static auto op = device_operator<void(const at::Tensor&, const at::Tensor&)>("deliver");
    op.call(device, host);
  }
};

static void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kType,
      "No backend type associated with device type ", tensor.device().type(), ": the simulated backend takes ",
      SIM_NAME, " tensors");
  TORCH_CHECK_VALUE(
      tensor.is_contiguous(tensor.suggest_memory_format()),
      "Tensors must be contiguous (got sizes ", tensor.sizes(), ", strides ", tensor.strides(), ")");
}

static Staged stage(const at::Tensor& tensor) {
  check_tensor(tensor);
  static auto op = device_operator<at::Tensor(const at::Tensor&)>("stage");
  const c10::NoGradGuard no_grad;
  return {tensor, op.call(tensor.detach())};
}

static std::vector<Staged> stage(const Tensors& tensors) {
  std::vector<Staged> staged;
  for (const auto& tensor : tensors) {
    staged.push_back(stage(tensor));
  }
  return staged;
}

static Tensors flat(const std::vector<Staged>& staged) {
  Tensors tensors;
  for (const auto& one : staged) {
    tensors.push_back(one.flat());
  }
  return tensors;
}

static std::vector<std::vector<Staged>> stage(const std::vector<Tensors>& lists) {
  std::vector<std::vector<Staged>> staged;
  for (const auto& list : lists) {
    staged.push_back(stage(list));
  }
  return staged;
}

static std::vector<Tensors> flat(const std::vector<std::vector<Staged>>& staged) {
  std::vector<Tensors> lists;
  for (const auto& list : staged) {
    lists.push_back(flat(list));
  }
  return lists;
}

static std::vector<Staged> joined(const std::vector<std::vector<Staged>>& lists) {
  std::vector<Staged> all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

// -- work -----------------------------------------------------------------------------------------------------

using Future = c10::ivalue::Future;

// Until when a group lives: what hangs in it, or is late, ends with an error when it is aborted or shut down.
class Life {
 public:
  bool aborted() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return aborted_;
  }

  void abort() {
    std::vector<Ptr<Future>> hanging;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
      hanging.swap(hanging_);
    }
    woken_.notify_all();
    for (const auto& future : hanging) {
      future->setErrorIfNeeded(error());
    }
  }

  void end_on_abort(const Ptr<Future>& future) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!aborted_) {
        hanging_.push_back(future);
        return;
      }
    }
    future->setErrorIfNeeded(error());
  }

  // Raises when the group is aborted before that time.
  void sleep_until(Clock::time_point time) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (woken_.wait_until(lock, time, [this] { return aborted_; })) {
      std::rethrow_exception(error());
    }
  }

  [[noreturn]] void hang() {
    std::unique_lock<std::mutex> lock(mutex_);
    woken_.wait(lock, [this] { return aborted_; });
    std::rethrow_exception(error());
  }

  // Run `work` in a thread of its own: it may sleep, and call back into Python.
  void run_aside(std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (aborted_) { // nobody waits for new threads any more, and the work has nothing to wait for
      lock.unlock();
      work();
      return;
    }
    for (auto aside = asides_.begin(); aside != asides_.end();) {
      auto next = std::next(aside);
      if (*aside->finished) {
        aside->thread.join(); // it is at its end
        asides_.erase(aside);
      }
      aside = next;
    }
    auto done = std::make_shared<std::atomic<bool>>(false);
    asides_.push_back({std::thread([work = std::move(work), done]() mutable {
                         work();
                         work = nullptr;
                         *done = true;
                       }),
                       done});
  }

  // Abort, and wait for the threads. Python's lock must not be held.
  void end() {
    abort();
    std::list<Aside> asides;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      asides.swap(asides_);
    }
    for (auto& [thread, finished] : asides) {
      if (thread.get_id() == std::this_thread::get_id()) { // a callback that drops the last reference to the group
        thread.detach();
      } else {
        thread.join();
      }
    }
  }

  bool has_threads() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return !asides_.empty();
  }

  static std::exception_ptr error() {
    return distributed_error("a collective that was late or hung (simulated) was aborted with its process group");
  }

  static std::exception_ptr distributed_error(const std::string& message) {
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
  }

 private:
  struct Aside {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> finished;
  };

  mutable std::mutex mutex_;
  std::condition_variable woken_;
  bool aborted_ = false;
  std::vector<Ptr<Future>> hanging_;
  std::list<Aside> asides_;
};

// Those of all groups of this process.
class Lives {
 public:
  std::shared_ptr<Life> make() {
    auto life = std::make_shared<Life>();
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(lives_, [](const auto& life) { return life.expired(); });
    lives_.push_back(life);
    return life;
  }

  // Before Python ends: a thread that wakes up after it would deliver to tensors, and call functions, that are gone.
  void end() {
    std::vector<std::shared_ptr<Life>> lives;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& life : lives_) {
        lives.push_back(life.lock());
      }
    }
    std::erase(lives, nullptr);
    for (const auto& life : lives) { // all, before one is waited for: one's callback may wait for another
      life->abort();
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      ended_ = true;
      left_.wait(lock, [this] { return inside_ == 0; });
    }
    for (const auto& life : lives) {
      life->end();
    }
  }

  // Run what may call back into Python from a thread of gloo's, which nobody joins: its end is waited for, and nothing
  // begins when Python has ended. False where it did not run.
  template <typename Work>
  bool unless_ended(Work&& work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ended_) {
        return false;
      }
      ++inside_;
    }
    work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      --inside_;
    }
    left_.notify_all();
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable left_;
  bool ended_ = false;
  int64_t inside_ = 0;
  std::vector<std::weak_ptr<Life>> lives_;
};

static Lives& lives() {
  static auto* instance = new Lives;
  return *instance;
}

struct Group { // what its works have to know
  int rank;
  int64_t global_rank;
  std::chrono::milliseconds timeout;
  std::shared_ptr<Life> life;
};

class SimWork final : public Work {
 public:
  SimWork(Group group, OpType type, std::vector<Staged> results, Fault fault, int64_t call, int divisor)
      : Work(group.rank, type),
        group_(std::move(group)),
        results_(std::move(results)),
        fault_(std::move(fault)),
        call_(call),
        divisor_(divisor),
        issued_(Clock::now()),
        not_before_(issued_ + std::chrono::duration_cast<Clock::duration>(
                                  std::chrono::duration<double>(slow() ? fault_.seconds : 0))) {}

  Ptr<Work> inner; // gloo's; none where this rank fails or hangs

  bool isCompleted() override {
    return fails() || (inner && Clock::now() >= not_before_ && inner->isCompleted());
  }

  bool isSuccess() const override {
    return inner && inner->isSuccess();
  }

  std::exception_ptr exception() const override {
    if (fails()) {
      return failure();
    }
    return inner ? inner->exception() : nullptr;
  }

  int sourceRank() const override {
    return inner ? inner->sourceRank() : -1;
  }

  Tensors result() override {
    Tensors outputs;
    for (const auto& staged : results_) {
      outputs.push_back(staged.device);
    }
    return outputs;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (fails()) {
      std::rethrow_exception(failure());
    }
    if (!inner) {
      group_.life->hang(); // as on hardware: no timeout helps
    }
    inner->wait(timeout);
    wait_until_due(timeout == kNoTimeout ? group_.timeout : timeout);
    deliver();
    return true;
  }

  void synchronize() override {
    wait();
  }

  void abort() override {
    group_.life->abort();
    if (inner) {
      inner->abort();
    }
  }

  // Asking for it has the results delivered as soon as they are there: callbacks need them.
  Ptr<Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) {
      return future_;
    }
    std::vector<c10::Device> devices;
    for (const auto& staged : results_) {
      if (std::find(devices.begin(), devices.end(), staged.device.device()) == devices.end()) {
        devices.push_back(staged.device.device());
      }
    }
    auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::move(devices));
    if (fails()) {
      future->setError(failure());
    } else if (!inner) {
      group_.life->end_on_abort(future);
    } else {
      auto self = Ptr<SimWork>::reclaim_copy(this);
      auto inner_future = inner->getFuture(); // gloo has none for a send or a receive, and says so
      inner_future->addCallback([self, future](Future& done) mutable {
        const bool ran = lives().unless_ended([&] {
          const auto work = std::move(self); // and gone with the future before Python may end: both may own its objects
          const auto delivered = std::move(future);
          if (done.hasError()) {
            delivered->setError(done.exception_ptr());
          } else if (work->slow()) { // gloo's thread has other work, and a caller's may hold Python's lock
            work->group_.life->run_aside([work, delivered] { work->complete(*delivered); });
          } else {
            work->complete(*delivered);
          }
        });
        if (!ran) {
          self.release();
          future.release();
        }
      });
    }
    future_ = std::move(future);
    return future_;
  }

 private:
  bool slow() const {
    return fault_.kind == "slow";
  }

  bool fails() const {
    return fault_.kind == "fail";
  }

  std::exception_ptr failure() const {
    return Life::distributed_error(c10::str(
        "simulated failure of collective ", call_, " (", c10d::opTypeToString(retrieveOpType()), ") on rank ",
        group_.global_rank));
  }

  void wait_until_due(std::chrono::milliseconds timeout) const {
    if (slow()) {
      group_.life->sleep_until(std::min(not_before_, issued_ + timeout));
    }
    if (not_before_ > issued_ + timeout) {
      std::rethrow_exception(Life::distributed_error(c10::str(
          "Timed out waiting ", timeout.count(), "ms for collective ", call_, " (",
          c10d::opTypeToString(retrieveOpType()), "), which is slow (simulated) on rank ", group_.global_rank)));
    }
  }

  void complete(Future& future) {
    try {
      wait_until_due(group_.timeout);
      deliver();
    } catch (...) {
      future.setError(std::current_exception());
      return;
    }
    future.markCompleted(c10::IValue(result()));
  }

  void deliver() {
    std::lock_guard<std::mutex> lock(deliver_mutex_);
    if (delivered_) {
      return;
    }
    const c10::NoGradGuard no_grad;
    if (divisor_ > 1) {
      for (const auto& staged : results_) {
        auto host = staged.host;
        if (at::isIntegralType(host.scalar_type(), /*includeBool=*/true)) {
          host.div_(divisor_, "trunc");
        } else {
          host.div_(divisor_);
        }
      }
      divisor_ = 1; // a delivery may fail, and be tried again
    }
    for (const auto& staged : results_) {
      staged.deliver();
    }
    delivered_ = true;
  }

  Group group_;
  std::vector<Staged> results_;
  Fault fault_;
  int64_t call_;
  int divisor_;
  Clock::time_point issued_;
  Clock::time_point not_before_;
  std::mutex deliver_mutex_;
  bool delivered_ = false;
  std::mutex future_mutex_;
  Ptr<Future> future_;
};

// What was issued between startCoalescing and endCoalescing, as one.
class CoalescedWork final : public Work {
 public:
  CoalescedWork(int rank, std::vector<Ptr<Work>> works) : Work(rank, OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }

  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }

  Tensors result() override {
    Tensors outputs;
    for (const auto& work : works_) {
      for (const auto& tensor : work->result()) {
        outputs.push_back(tensor);
      }
    }
    return outputs;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }

  void synchronize() override {
    wait();
  }

  void abort() override {
    for (const auto& work : works_) {
      work->abort();
    }
  }

  // Of all the results, when the last is there; with an error as soon as one has it.
  Ptr<Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) {
      return future_;
    }
    std::vector<Ptr<Future>> parts;
    std::vector<c10::Device> devices;
    for (const auto& work : works_) {
      parts.push_back(work->getFuture());
      for (const auto& device : parts.back()->devices()) {
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
          devices.push_back(device);
        }
      }
    }
    auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::move(devices));
    if (parts.empty()) {
      future->markCompleted(c10::IValue(Tensors()));
    }
    auto self = Ptr<CoalescedWork>::reclaim_copy(this);
    auto missing = std::make_shared<std::atomic<size_t>>(parts.size());
    for (const auto& part : parts) {
      part->addCallback([self, future, missing](Future& done) {
        if (done.hasError()) {
          future->setErrorIfNeeded(done.exception_ptr());
        } else if (--*missing == 0) {
          future->markCompleted(c10::IValue(self->result()));
        }
      });
    }
    future_ = std::move(future);
    return future_;
  }

 private:
  std::vector<Ptr<Work>> works_;
  std::mutex future_mutex_;
  Ptr<Future> future_;
};

// -- backend --------------------------------------------------------------------------------------------------

class SimBackend final : public Backend {
 public:
  SimBackend(Ptr<Backend> gloo, int rank, int size, int64_t global_rank)
      : Backend(rank, size), gloo_(std::move(gloo)), global_rank_(global_rank) {}

  ~SimBackend() override {
    std::optional<pybind11::gil_scoped_release> without_lock;
    if (life_->has_threads() && PyGILState_Check()) { // one may need it to come to its end
      without_lock.emplace();
    }
    life_->end();
  }

  bool supportsCoalescing() const override {
    return true;
  }

  // Nothing waits for the end: gloo gets each at once.
  void startCoalescing() override {
    coalesced_.emplace();
  }

  Ptr<Work> endCoalescing() override {
    TORCH_CHECK(coalesced_.has_value(), "endCoalescing without startCoalescing");
    auto work = c10::make_intrusive<CoalescedWork>(getRank(), std::move(*coalesced_));
    coalesced_.reset();
    return work;
  }

  const std::string getBackendName() const override {
    return std::string(kType == c10::DeviceType::HPU ? "hccl" : SIM_NAME);
  }

  Ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }

  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }

  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

  void abort() override {
    life_->abort();
    gloo_->abort();
  }

  void shutdown() override {
    life_->abort();
    gloo_->shutdown();
  }

  Ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto staged = stage(tensors);
    return run(OpType::BROADCAST, staged, [&] {
      auto host = flat(staged);
      return gloo_->broadcast(host, options);
    });
  }

  Ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto staged = stage(tensors);
    const auto [host_options, divisor] = summed(options);
    return run(
        OpType::ALLREDUCE, staged,
        [&, host_options = host_options] {
          auto host = flat(staged);
          return gloo_->allreduce(host, host_options);
        },
        divisor);
  }

  Ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto staged = stage(tensors);
    const auto [host_options, divisor] = summed(options);
    return run(
        OpType::ALLREDUCE_COALESCED, staged,
        [&, host_options = host_options] {
          auto host = flat(staged);
          return gloo_->allreduce_coalesced(host, host_options);
        },
        divisor);
  }

  Ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto staged = stage(tensors);
    const auto [host_options, divisor] = summed(options);
    const bool root = options.rootRank == getRank();
    return run(
        OpType::REDUCE, root ? staged : std::vector<Staged>{},
        [&, host_options = host_options] {
          auto host = flat(staged);
          return gloo_->reduce(host, host_options);
        },
        divisor);
  }

  Ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = stage(outputs);
    return run(OpType::ALLGATHER, joined(out), [&] {
      auto host_out = flat(out);
      auto host_in = flat(stage(inputs));
      return gloo_->allgather(host_out, host_in, options);
    });
  }

  Ptr<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = stage(output);
    return run(OpType::_ALLGATHER_BASE, {out}, [&] {
      auto host_out = out.flat(), host_in = stage(input).flat();
      return gloo_->_allgather_base(host_out, host_in, options);
    });
  }

  Ptr<Work> allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = stage(outputs);
    return run(OpType::ALLGATHER_COALESCED, joined(out), [&] {
      auto host_out = flat(out);
      auto host_in = flat(stage(inputs));
      return gloo_->allgather_coalesced(host_out, host_in, options);
    });
  }

  Ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = stage(outputs);
    return run(OpType::COALESCED, out, [&] {
      auto host_out = flat(out), host_in = flat(stage(inputs));
      return gloo_->allgather_into_tensor_coalesced(host_out, host_in, options);
    });
  }

  Ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = stage(outputs);
    return run(OpType::GATHER, joined(out), [&] {
      auto host_out = flat(out);
      auto host_in = flat(stage(inputs));
      return gloo_->gather(host_out, host_in, options);
    });
  }

  Ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto out = stage(outputs);
    return run(OpType::SCATTER, out, [&] {
      auto host_out = flat(out);
      auto host_in = flat(stage(inputs));
      return gloo_->scatter(host_out, host_in, options);
    });
  }

  Ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == 1 && inputs.size() == 1, "reduce_scatter takes one output and one input list");
    return reduced_and_scattered(
        OpType::REDUCE_SCATTER, stage(outputs), {at::cat(flat(stage(inputs.front())))}, options);
  }

  Ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduced_and_scattered(OpType::_REDUCE_SCATTER_BASE, {stage(output)}, {stage(input).flat()}, options);
  }

  Ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduced_and_scattered(
        OpType::REDUCE_SCATTER_TENSOR_COALESCED, stage(outputs), flat(stage(inputs)), options);
  }

  Ptr<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    auto out = stage(output);
    return run(OpType::ALLTOALL_BASE, {out}, [&] {
      auto host_out = out.host, host_in = stage(input).host; // splits count rows
      return gloo_->alltoall_base(host_out, host_in, output_splits, input_splits, options);
    });
  }

  // gloo has it for one tensor that is split, so the tensors are made parts of one.
  Ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto out = stage(outputs);
    std::vector<int64_t> out_sizes, in_sizes;
    int64_t total = 0;
    for (const auto& staged : out) {
      out_sizes.push_back(staged.host.numel());
      total += staged.host.numel();
    }
    auto host_in = flat(stage(inputs));
    for (const auto& tensor : host_in) {
      in_sizes.push_back(tensor.numel());
    }
    auto joined_out = at::empty({total}, out.at(0).host.options());
    auto joined_in = at::cat(host_in);
    int64_t offset = 0;
    for (auto& staged : out) {
      staged.host = joined_out.as_strided(staged.host.sizes(), staged.host.strides(), offset);
      offset += staged.host.numel();
    }
    return run(OpType::ALLTOALL, out, [&] {
      return gloo_->alltoall_base(joined_out, joined_in, out_sizes, in_sizes, options);
    });
  }

  Ptr<Work> send(Tensors& tensors, int destination, int tag) override {
    auto staged = stage(tensors);
    return run(OpType::SEND, {}, [&] {
      auto host = flat(staged);
      return gloo_->send(host, destination, tag);
    });
  }

  Ptr<Work> recv(Tensors& tensors, int source, int tag) override {
    auto staged = stage(tensors);
    return run(OpType::RECV, staged, [&] {
      auto host = flat(staged);
      return gloo_->recv(host, source, tag);
    });
  }

  Ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    auto staged = stage(tensors);
    return run(OpType::RECVANYSOURCE, staged, [&] {
      auto host = flat(staged);
      return gloo_->recvAnysource(host, tag);
    });
  }

  Ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return run(OpType::BARRIER, {}, [&] { return gloo_->barrier(options); });
  }

 private:
  // gloo can't average: it sums, and the result is divided before it is delivered.
  template <typename Options>
  std::pair<Options, int> summed(Options options) const {
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      TORCH_CHECK(averages, "the simulated " SIM_NAME " was told to have no ReduceOp.AVG");
      options.reduceOp = c10d::ReduceOp::SUM;
      return {options, getSize()};
    }
    return {options, 1};
  }

  // gloo's own reduce-scatter does its work in wait(), so it never completes by itself and has no future. Nor does it
  // save anything: it reduces all of the input on every rank, as this does.
  Ptr<Work> reduced_and_scattered(
      OpType type, std::vector<Staged> out, Tensors inputs, const c10d::ReduceScatterOptions& options) {
    TORCH_CHECK_VALUE(out.size() == inputs.size(), "as many outputs as inputs are needed");
    for (const auto index : c10::irange(out.size())) {
      auto& [device, host] = out[index];
      const auto& input = inputs[index];
      TORCH_CHECK_VALUE(
          input.numel() == host.numel() * getSize(), "input tensor must be the same size as output size times world size");
      TORCH_CHECK_TYPE(input.scalar_type() == host.scalar_type(), "input and output must have the same dtype");
      host = input.as_strided(host.sizes(), host.strides(), getRank() * host.numel());
    }
    c10d::AllreduceCoalescedOptions all;
    all.reduceOp = options.reduceOp;
    all.timeout = options.timeout;
    const auto [host_options, divisor] = summed(all);
    return run(
        type, out, [&, host_options = host_options] { return gloo_->allreduce_coalesced(inputs, host_options); },
        divisor);
  }

  template <typename Issue>
  Ptr<Work> run(OpType type, std::vector<Staged> results, Issue&& issue, int divisor = 1) {
    auto [applied, call] = next_call(global_rank_);
    const bool joins = applied.kind != "fail" && applied.kind != "hang";
    const Group group{getRank(), global_rank_, gloo_->getBackendOptions()->timeout, life_};
    auto work = c10::make_intrusive<SimWork>(group, type, std::move(results), applied, call, divisor);
    if (joins) {
      work->inner = issue();
    }
    if (coalesced_) {
      coalesced_->push_back(work);
    }
    return work;
  }

  Ptr<Backend> gloo_;
  int64_t global_rank_;
  std::shared_ptr<Life> life_ = lives().make();
  std::optional<std::vector<Ptr<Work>>> coalesced_;
};

static Ptr<Backend> wrap(const Ptr<Backend>& gloo, int rank, int size, int64_t global_rank) {
  return c10::make_intrusive<SimBackend>(gloo, rank, size, global_rank);
}

} // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("wrap", &sim::wrap, "A backend for device tensors over a gloo backend.");
  m.def("set_fault", &sim::set_fault);
  m.def("collectives", &sim::collectives);
  m.def("set_averages", [](bool on) { sim::averages = on; }, "Whether there is ReduceOp.AVG; some hardware has none.");
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(
      [] { sim::lives().end(); }, pybind11::call_guard<pybind11::gil_scoped_release>()));
}

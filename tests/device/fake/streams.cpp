#include "device/fake/streams.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "device/fake/device.h"

namespace lockstep::test::fake {
namespace {

constexpr auto kStreamType = c10::DeviceType::PrivateUse1;

std::atomic<bool> gate_is_shut{false};

// Never destroyed: their threads run until the process ends.
struct Streams {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, std::unique_ptr<FakeStream>> all;
  c10::StreamId last = 0;
};

Streams& streams() {
  static auto* streams = new Streams;
  return *streams;
}

std::atomic<bool> has_failed{false};

void check_works() { TORCH_CHECK(!has_failed, "CUDA error: device-side assert triggered"); }

struct Users {
  std::mutex mutex;
  std::map<const void*, std::set<FakeStream*>> of_memory;
};
Users& users() {
  static auto* users = new Users;
  return *users;
}

thread_local bool is_stream = false;  // this thread
thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<int, c10::StreamId> current_streams;

void check_not_captured(const FakeEvent& event) {
  TORCH_CHECK(event.recording == nullptr, "the fake device: an event of a capture cannot be asked");
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStreamType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kStreamType, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override { return {kStreamType, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    const char* count = std::getenv("FAKE_DEVICES");
    return static_cast<c10::DeviceIndex>(count != nullptr ? std::atoi(count) : 8);
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, {kStreamType, static_cast<c10::DeviceIndex>(index)},
                       current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const std::lock_guard lock(streams().mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, ++streams().last);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return static_cast<FakeStreamHandle*>(&FakeStream::of(stream));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<FakeEvent*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    check_works();
    if (*event == nullptr) *event = new FakeEvent;
    FakeStream& on = FakeStream::of(stream);
    if (const auto recording = on.recording()) {
      const std::lock_guard lock(recording->mutex);
      *static_cast<FakeEvent*>(*event) = {&on, recording->recorded[&on], recording};
    } else {
      *static_cast<FakeEvent*>(*event) = {&on, on.push([] {}), nullptr};
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    check_works();
    const FakeEvent seen = *static_cast<FakeEvent*>(event);
    FakeStream& waits = FakeStream::of(stream);
    if (seen.recording != nullptr) {
      const std::lock_guard lock(seen.recording->mutex);
      seen.recording->joined[seen.stream] = seen.number;
      return waits.record_into(seen.recording);
    }
    if (seen.stream != &waits) waits.push([seen] { seen.stream->finish(seen.number); });
  }
  bool queryEvent(void* event) const override {
    check_works();
    const auto* seen = static_cast<FakeEvent*>(event);
    check_not_captured(*seen);
    return seen->stream->is_done(seen->number);
  }
  void synchronizeEvent(void* event) const override {
    check_works();
    const auto* seen = static_cast<FakeEvent*>(event);
    check_not_captured(*seen);
    seen->stream->finish(seen->number);
  }
  bool queryStream(const c10::Stream& stream) const override {
    FakeStream& on = FakeStream::of(stream);
    return on.is_done(on.pushed());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    FakeStream::of(stream).finish_all();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    check_works();
    // A stream lets go of what its work has used, and cannot wait for itself. Nobody else uses it:
    // who does keeps it.
    if (is_stream) return;
    std::vector<FakeStream*> all;
    {
      const std::lock_guard lock(streams().mutex);
      for (const auto& [key, stream] : streams().all) {
        if (key.first == index) all.push_back(stream.get());
      }
    }
    for (FakeStream* stream : all) stream->finish_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    note_use(data.get(), FakeStream::of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

}  // namespace

FakeStream::FakeStream() {
  enqueue_communication = [](FakeStreamHandle* stream, void (*work)(void*), void* argument,
                             void (*release)(void*)) {
    static_cast<FakeStream*>(stream)->push(
        [work, own = std::shared_ptr<void>(argument, release)] { work(own.get()); }, true);
  };
  FakeStreamHandle::finish = [](FakeStreamHandle* stream) {
    static_cast<FakeStream*>(stream)->finish_all();
  };
  std::thread([this] { run(); }).detach();
}

uint64_t FakeStream::push(std::function<void()> work, bool is_communication) {
  const std::lock_guard lock(mutex_);
  if (recording_ != nullptr) {
    const std::lock_guard recording_lock(recording_->mutex);
    recording_->work.push_back(std::move(work));
    return ++recording_->recorded[this];
  }
  tasks_.push_back({std::move(work), is_communication});
  changed_.notify_all();
  return ++pushed_;
}

void FakeStream::record_into(std::shared_ptr<Recording> recording) {
  const std::lock_guard lock(mutex_);
  recording_ = std::move(recording);
}

std::shared_ptr<Recording> FakeStream::recording() {
  const std::lock_guard lock(mutex_);
  return recording_;
}

bool FakeStream::is_done(uint64_t number) {
  const std::lock_guard lock(mutex_);
  return done_ >= number;
}

void FakeStream::finish(uint64_t number) {
  std::unique_lock lock(mutex_);
  wanted_ = std::max(wanted_, number);
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_ >= number; });
}

void FakeStream::finish_all() {
  TORCH_CHECK(recording() == nullptr, "the fake device: the host waits for what is only captured");
  finish(pushed());
}

uint64_t FakeStream::pushed() {
  const std::lock_guard lock(mutex_);
  return pushed_;
}

void FakeStream::run() {
  is_stream = true;
  at::init_num_threads();  // as many as the thread that queues the work: a sum's bits depend on it
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      return !tasks_.empty() &&
             (!tasks_.front().is_communication || !gate_is_shut || wanted_ > done_);
    });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task.work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "fake device: %s\n", error.what());
      std::abort();
    }
    task = {};
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

FakeStream& FakeStream::of(const c10::Stream& stream) {
  const std::lock_guard lock(streams().mutex);
  auto& slot = streams().all[{stream.device_index(), stream.id()}];
  if (!slot) slot = std::make_unique<FakeStream>();
  return *slot;
}

c10::Stream current_stream() { return FakeGuard().getStream({kStreamType, current_device}); }
FakeStream& FakeStream::current() { return of(current_stream()); }

void enqueue(const c10::Stream& stream, std::function<void()> work) {
  FakeStream::of(stream).push(std::move(work));
}

Graph::Graph(const std::function<void()>& body) : recording_(std::make_shared<Recording>()) {
  FakeStream& first = FakeStream::current();
  const auto stop = [&] {
    first.record_into(nullptr);
    for (const auto& [stream, count] : recording_->recorded) stream->record_into(nullptr);
  };
  first.record_into(recording_);
  try {
    body();
  } catch (...) {
    stop();
    throw;
  }
  stop();
  for (const auto& [stream, count] : recording_->recorded) {
    TORCH_CHECK(stream == &first || recording_->joined[stream] == count,
                "the fake device: a capture ends with work that nothing waits for");
  }
}

void Graph::launch() const {
  for (const auto& work : recording_->work) FakeStream::current().push(work, true);
}

bool is_capturing(const c10::Stream& stream) {
  return FakeStream::of(stream).recording() != nullptr;
}

void note_use(const void* memory, FakeStream& stream) {
  const std::lock_guard lock(users().mutex);
  users().of_memory[memory].insert(&stream);
}

StreamUses take_uses(const void* memory) {
  StreamUses uses;
  const std::lock_guard lock(users().mutex);
  for (FakeStream* stream : users().of_memory[memory]) uses.emplace_back(stream, stream->pushed());
  users().of_memory.erase(memory);
  return uses;
}

void fail_device() { has_failed = true; }

void shut_gate() { gate_is_shut = true; }

void open_gate() {
  gate_is_shut = false;
  const std::lock_guard lock(streams().mutex);
  for (const auto& [key, stream] : streams().all) {
    const std::lock_guard stream_lock(stream->mutex_);
    stream->changed_.notify_all();
  }
}

int held_back() {
  int count = 0;
  const std::lock_guard lock(streams().mutex);
  for (const auto& [key, stream] : streams().all) {
    const std::lock_guard stream_lock(stream->mutex_);
    for (const auto& task : stream->tasks_) count += task.is_communication;
  }
  return count;
}

}  // namespace lockstep::test::fake

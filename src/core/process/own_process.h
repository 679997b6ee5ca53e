// Whether an object is in the process that made it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

// A child of fork() has copies of this process's objects, but neither its threads nor the memory
// that it shares with other ranks, and its descriptors are still the parent's: what the child does
// with them, the parent and its peers see. So such copies do nothing there, not even at their end.
class OwnProcess {
 public:
  OwnProcess();

  // Costs a load, so each call may ask.
  bool is_here() const noexcept;
  // "the group belongs to process 1234, which has made this one by fork(): a child cannot use it",
  // where `what` is "group".
  std::string refusal(std::string_view what) const;

 private:
  pid_t pid_;
  uint32_t forks_;
};

// The object, which its last handle destroys, though in no child of this process.
template <class T>
std::shared_ptr<T> not_for_children(std::shared_ptr<T> object) {
  T* const pointer = object.get();
  return {pointer, [process = OwnProcess(), object = std::move(object)](T*) mutable {
            if (!process.is_here()) new std::shared_ptr<T>(std::move(object));
            object.reset();
          }};
}

}  // namespace lockstep

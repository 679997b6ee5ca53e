// Python's way to the backend: lockstep._C.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/c10d/backend.h"
#include "lockstep/core/error.h"

namespace {

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         const std::vector<int>& world_ranks,
                                         std::chrono::milliseconds timeout) {
  return lockstep::c10d_backend::make_backend(
      store, {rank, static_cast<int>(world_ranks.size()), world_ranks}, {.timeout = timeout});
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  const pybind11::call_guard<pybind11::gil_scoped_release> released;
  module.def("create", &create, released);
  module.def("shut_all_down", &lockstep::c10d_backend::shut_all_down, released);
}

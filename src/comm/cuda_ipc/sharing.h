// How ranks of a host come to map each other's device memory: over the group for CPUs, and with
// descriptors that go through their doors.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "comm/cuda_ipc/communicator.h"
#include "comm/transport.h"

namespace lockstep::comm::cuda_ipc {

class Sharing {
 public:
  // `doors` by rank of `cpu`.
  Sharing(std::shared_ptr<Transport> cpu, std::vector<std::string> doors)
      : cpu_(std::move(cpu)), doors_(std::move(doors)) {}

  // Runs one step on all ranks, and returns what each has written of itself into a `Report`, a
  // struct of plain values. Throws ConfigError on all when one could not do it.
  template <class Report, class Step>
  std::vector<Report> on_all(const Step& step) const {
    Said<Report> mine{};
    try {
      step(mine.report);
    } catch (const std::exception& error) {
      std::strncpy(mine.problem, error.what(), sizeof mine.problem - 1);
    }
    const auto texts = exchange({reinterpret_cast<const char*>(&mine), sizeof mine});
    std::vector<Report> reports;
    for (size_t r = 0; r < texts.size(); ++r) {
      Said<Report> said{};
      std::memcpy(&said, texts[r].data(), std::min(texts[r].size(), sizeof said));
      if (said.problem[0] != '\0') refuse(said.problem, r);
      reports.push_back(said.report);
    }
    return reports;
  }
  template <class Step>
  void on_all(const Step& step) const {
    on_all<char>([&](char&) { step(); });
  }

  // `bytes` of zeroed memory of each rank's device, by rank. Throws ConfigError on all ranks when
  // one does not have them.
  std::vector<DeviceMemory> memory_of_all(Communicator& comm, U64 bytes) const;

 private:
  template <class Report>
  struct Said {
    Report report;
    char problem[1000];
  };
  std::vector<std::string> exchange(std::string_view mine) const;
  [[noreturn]] static void refuse(const std::string& problem, size_t rank);

  const std::shared_ptr<Transport> cpu_;
  const std::vector<std::string> doors_;
};

}  // namespace lockstep::comm::cuda_ipc

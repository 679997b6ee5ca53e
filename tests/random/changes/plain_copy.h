// One copy of the model in a process with libtorch alone, and what steps it.
#pragma once

#include "random/changes/net.h"

namespace lockstep::test::changes {

struct PlainCopy {
  const Course& course;
  Net net;
  Groups groups;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  std::vector<std::vector<double>> bases;  // of the rates, by optimizer
  std::vector<int> scheduled;              // steps of the schedule

  explicit PlainCopy(const Course& of);

  // Of each optimizer the groups' parameters.
  std::vector<std::vector<Named>> members() const;
  OptimizerParamGroup& group(size_t i) {
    return optimizers[i % optimizers.size()]->param_groups()[i / optimizers.size()];
  }
  std::vector<double> rates();
  // `family`: of all. `rates`: of the first groups.
  void make_optimizers(const std::string& family, const std::vector<double>& rates);
  // After a change of the model or the groups.
  void follow(const Change& change, const std::string& family);
  void begin_schedules();
  // One step of the i-th optimizer's.
  void schedule(size_t i);
  void clear_gradients();
};

// Undefined where there is none.
std::vector<at::Tensor> copies_of_gradients(const Named& parameters);

}  // namespace lockstep::test::changes

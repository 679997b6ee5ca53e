#include "random/changes/plain_copy.h"

#include <cmath>

namespace lockstep::test::changes {

PlainCopy::PlainCopy(const Course& of)
    : course(of), net(of, mixed(of.seed, 0)), groups(groups_of(of)) {}

std::vector<std::vector<Named>> PlainCopy::members() const {
  std::vector<std::vector<Named>> all(optimizers.size());
  size_t i = 0;
  for (auto& group : members_of(*net, groups)) all[i++ % all.size()].push_back(std::move(group));
  return all;
}

// Those of the groups that there were and still are.
std::vector<double> PlainCopy::rates() {
  std::vector<double> all;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& own = optimizers[i % optimizers.size()]->param_groups();
    if (i / optimizers.size() < own.size()) all.push_back(group(i).options().get_lr());
  }
  return all;
}

void PlainCopy::make_optimizers(const std::string& family, const std::vector<double>& rates) {
  optimizers.resize(static_cast<size_t>(course.optimizers));
  const auto all = members();
  for (size_t i = 0; i < optimizers.size(); ++i) {
    std::vector<OptimizerParamGroup> own;
    for (const auto& some : all[i]) own.push_back(group_of(some));
    optimizers[i] = made(family, std::move(own));
  }
  for (size_t i = 0; i < rates.size(); ++i) group(i).options().set_lr(rates[i]);
  begin_schedules();
}

void PlainCopy::follow(const Change& change, const std::string& family) {
  if (change.anew) return make_optimizers(family, rates());
  const auto all = members();
  for (size_t i = 0; i < all.size(); ++i) give_members(*optimizers[i], all[i]);
  if (change.what == What::DropGroup) begin_schedules();
}

void PlainCopy::begin_schedules() {
  scheduled.assign(optimizers.size(), 0);
  bases.assign(optimizers.size(), {});
  for (size_t i = 0; i < optimizers.size(); ++i) {
    for (const auto& own : optimizers[i]->param_groups())
      bases[i].push_back(own.options().get_lr());
  }
}

void PlainCopy::schedule(size_t i) {
  auto& own = optimizers[i]->param_groups();
  for (size_t j = bases[i].size(); j < own.size(); ++j)
    bases[i].push_back(own[j].options().get_lr());
  const double factor = std::pow(course.gamma, ++scheduled[i]);
  for (size_t j = 0; j < own.size(); ++j) own[j].options().set_lr(bases[i][j] * factor);
}

void PlainCopy::clear_gradients() {
  if (course.clear == Clear::Wrapper) return net->zero_grad();
  for (auto& optimizer : optimizers) optimizer->zero_grad(course.clear == Clear::Optimizer);
}

std::vector<at::Tensor> copies_of_gradients(const Named& parameters) {
  std::vector<at::Tensor> all;
  for (const auto& [name, parameter] : parameters) {
    all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return all;
}

}  // namespace lockstep::test::changes

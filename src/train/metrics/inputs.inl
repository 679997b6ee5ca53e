#include <fmt/format.h>

#include <cmath>

namespace lockstep::train {

template <class Element, class Use, class Fault>
void each_row(const ClassRows& rows, std::optional<int64_t> ignored, const Use& use,
              const Fault& fault) {
  const int64_t classes = rows.outputs.size(1);
  const auto* outputs = rows.outputs.const_data_ptr<Element>();
  const auto* targets = rows.targets.const_data_ptr<int64_t>();
  const auto* weights = rows.weights.defined() ? rows.weights.const_data_ptr<double>() : nullptr;
  for (int64_t i = 0; i < rows.targets.size(0); ++i) {
    if (ignored && targets[i] == *ignored) continue;
    if (targets[i] < 0 || targets[i] >= classes) {
      fault(i, fmt::format("target {} is none of the classes 0 to {}", targets[i], classes - 1));
      continue;
    }
    const Element* row = outputs + i * classes;
    int64_t c = 0;
    while (c < classes && !std::isnan(row[c])) ++c;
    if (c < classes) {
      fault(i, fmt::format("the output for class {} is NaN", c));
      continue;
    }
    use(row, targets[i], weights == nullptr ? 1.0 : weights[i], i);
  }
}

template <class Use, class Fault>
void each_sample(const ClassRows& rows, std::optional<int64_t> ignored, const Use& use,
                 const Fault& fault) {
  if (rows.outputs.scalar_type() == at::kDouble) {
    each_row<double>(rows, ignored, use, fault);
  } else {
    each_row<float>(rows, ignored, use, fault);
  }
}

}  // namespace lockstep::train

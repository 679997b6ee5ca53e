#include "parallel/ddp/attached_module.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/transport.h"
#include "parallel/ddp/packed.h"

namespace lockstep::parallel {
namespace {

const Named* find(const std::vector<Named>& items, const std::string& name) {
  const auto found = std::ranges::find(items, name, &Named::name);
  return found == items.end() ? nullptr : &*found;
}

std::string describe(at::ScalarType dtype, at::Device device, at::IntArrayRef sizes) {
  return fmt::format("{} [{}] on {}", comm::name_of(dtype), fmt::join(sizes, ", "), device.str());
}

// Whether all that is done with the buffer can be done with the one in its place.
bool fits(const at::Tensor& buffer, const at::Tensor& other) {
  return other.layout() == at::kStrided && !other.is_quantized() && !other.is_inference() &&
         other.scalar_type() == buffer.scalar_type() && other.device() == buffer.device() &&
         other.sizes() == buffer.sizes() &&
         own_elements(other).sizes() == own_elements(buffer).sizes() && !has_overlaps(other);
}

// The first of `now` that was not there, or was another tensor; or of `before` that is gone.
std::string first_replaced(std::string_view kind, const std::vector<Named>& before,
                           const std::vector<Named>& now) {
  for (const auto& item : now) {
    const Named* was = find(before, item.name);
    if (was == nullptr) return fmt::format("{} '{}' was added", kind, item.name);
    if (!was->tensor.is_same(item.tensor)) {
      return fmt::format("{} '{}' was replaced by another tensor", kind, item.name);
    }
  }
  for (const auto& item : before) {
    if (find(now, item.name) == nullptr) return fmt::format("{} '{}' was removed", kind, item.name);
  }
  return {};
}

}  // namespace

AttachedModule::AttachedModule(ModuleRef module, ModelNotes notes)
    : module_(std::move(module)), notes_(std::move(notes)), model_(Model::of(module_, notes_)) {
  for (const at::Tensor& tensor : model_.tensors()) was_.push_back(as_it_is(tensor));
  tensors_ = module_.tensors();
}

AttachedModule::Was AttachedModule::as_it_is(const at::Tensor& tensor) {
  return {tensor, tensor.scalar_type(), tensor.device(), tensor.sizes().vec(),
          tensor.requires_grad()};
}

bool AttachedModule::is_same(const Was& was) {
  return was.tensor.scalar_type() == was.dtype && was.tensor.device() == was.device &&
         was.tensor.sizes() == was.sizes && (was.is_trainable || !was.tensor.requires_grad());
}

std::string AttachedModule::change() {
  auto text = difference();
  if (!text.empty()) {
    text += " after Ddp was attached: call ddp.refresh() on every rank after such a change";
  }
  return text;
}

bool AttachedModule::has_same_tensors() const {
  return std::ranges::equal(
      module_.tensors(), tensors_,
      [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); });
}

const std::vector<Named>& AttachedModule::follow_buffers() {
  if (model_.buffers.empty() || module_.has_expired() || has_same_tensors()) return model_.buffers;
  const Model now = Model::of(module_, notes_);
  for (size_t i = 0; i < model_.buffers.size(); ++i) {
    Named& item = model_.buffers[i];
    const Named* other = find(now.buffers, item.name);
    if (other == nullptr || !fits(item.tensor, other->tensor)) continue;
    item = *other;
    was_[model_.parameters.size() + i] = as_it_is(item.tensor);
  }
  difference(now, module_.tensors());
  return model_.buffers;
}

std::string AttachedModule::difference() {
  for (size_t i = 0; i < was_.size(); ++i) {
    const Was& was = was_[i];
    if (is_same(was)) continue;
    const bool is_parameter = i < model_.parameters.size();
    const Named& item =
        is_parameter ? model_.parameters[i] : model_.buffers[i - model_.parameters.size()];
    const auto now = describe(was.tensor.scalar_type(), was.tensor.device(), was.tensor.sizes());
    const auto before = describe(was.dtype, was.device, was.sizes);
    return fmt::format(
        "{} '{}' was {}", is_parameter ? "parameter" : "buffer", item.name,
        now == before ? "unfrozen" : fmt::format("{} and was converted to {}", before, now));
  }
  if (module_.has_expired() || has_same_tensors()) return {};
  return difference(Model::of(module_, notes_), module_.tensors());
}

std::string AttachedModule::difference(const Model& now, std::vector<at::Tensor> tensors) {
  if (!now.unknown.empty()) return now.unknown;
  if (auto text = first_replaced("parameter", model_.parameters, now.parameters); !text.empty())
    return text;
  if (auto text = first_replaced("buffer", model_.buffers, now.buffers); !text.empty()) {
    return fmt::format("{} ({}::ignore leaves alone what forward() replaces)", text,
                       notes_.options);
  }
  tensors_ = std::move(tensors);  // only what is ignored has changed
  return {};
}

bool AttachedModule::zero_grad() const {
  const auto reset = [](const at::Tensor& tensor) {
    const bool has_one = tensor.grad().defined();
    if (has_one) tensor.mutable_grad().reset();
    return has_one;
  };
  for (const auto& item : model_.parameters) reset(item.tensor);
  bool of_others = false;
  if (module_.has_expired()) return of_others;
  for (const auto& tensor : module_.tensors()) of_others |= reset(tensor);
  return of_others;
}

}  // namespace lockstep::parallel

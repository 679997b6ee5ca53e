// The arguments of a call, of which the tools here want texts only.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::rl::embedded {

// The members of a JSON object. What is not an object has none.
class FlatJson {
 public:
  explicit FlatJson(std::string_view json);

  bool has(std::string_view name) const;
  // The value, if it is a text.
  std::optional<std::string> text(std::string_view name) const;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> members_;
};

}  // namespace lockstep::rl::embedded

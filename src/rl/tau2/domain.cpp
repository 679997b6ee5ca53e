#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "core/hash/sha256.h"
#include "rl/tau2/child.h"

namespace lockstep::rl {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"airline", "retail", "telecom"};

// What an agent in solo mode calls when it has finished.
constexpr std::string_view kDone =
    R"({"type": "function", "function": {"name": "done", "description": "Call this when the ticket is )"
    R"(solved.", "parameters": {"type": "object", "properties": {}, "required": []}}})";

Json call_json(const ToolCall& call) {
  auto arguments = Json::parse(call.arguments, nullptr, false);
  if (!arguments.is_object()) arguments = Json::object();
  return {{"id", call.id},
          {"name", call.name},
          {"arguments", std::move(arguments)},
          {"requestor", call.by == Party::User ? "user" : "assistant"}};
}

// What tau2 replays: without messages that were not passed on, and, in solo mode, which has no
// user, without user messages, of which the ticket is one.
Json messages_json(std::span<const Message> log, Solo solo) {
  Json messages = Json::array();
  for (const auto& message : log) {
    if (message.role == Role::System || (message.role == Role::Assistant && message.error))
      continue;
    if (message.role == Role::User && solo == Solo::Yes) continue;
    if (message.role == Role::Tool) {
      if (message.call_id.empty()) continue;
      messages.push_back({{"role", "tool"},
                          {"id", message.call_id},
                          {"content", message.content},
                          {"requestor", message.by == Party::User ? "user" : "assistant"},
                          {"error", message.error}});
      continue;
    }
    Json json = {{"role", name_of(message.role)}};
    if (message.calls.empty()) {
      json["content"] = message.content;
    } else {
      json["tool_calls"] = Json::array();
      for (const auto& call : message.calls) json["tool_calls"].push_back(call_json(call));
    }
    messages.push_back(std::move(json));
  }
  return messages;
}

std::vector<std::string> schemas(const Json& list) {
  std::vector<std::string> texts;
  for (const auto& schema : list) texts.push_back(python_json(schema));
  return texts;
}

std::string text_of(const Json& answer, const char* name) {
  const auto found = answer.find(name);
  return found != answer.end() && found->is_string() ? found->get<std::string>() : "";
}

// An answer of another shape than it has to have says that the process is another program.
template <class Read>
auto reading(const Read& read) {
  try {
    return read();
  } catch (const Json::exception& error) {
    throw EnvironmentError(
        fmt::format("[tau2] an answer is not as it should be: {}", error.what()));
  }
}

// A request about the tasks of a domain.
Json about_tasks(const char* op, const std::string& domain, const std::string& split,
                 const Tau2TaskFile& file) {
  Json request = {{"op", op}, {"domain", domain}, {"split", split}};
  if (!file.path.empty()) request["file"] = file.path;
  return request;
}

// What a task wants done.
Json gold(Tau2Bridge::Child& child, const TaskKey& key, const Tau2TaskFile& file) {
  Json request = about_tasks("gold", key.domain, key.split, file);
  request["task"] = key.id;
  return child.ask(std::move(request));
}

class Tau2Environment : public Environment {
 public:
  Tau2Environment(std::string domain, std::shared_ptr<Tau2Bridge::Child> child, Solo solo,
                  Tau2TaskFile file)
      : domain_(std::move(domain)), child_(std::move(child)), solo_(solo), file_(std::move(file)) {}
  ~Tau2Environment() override {
    try {
      leave();
    } catch (...) {
    }
  }

  Scene reset(const TaskKey& key, uint64_t) override {
    if (key.domain != domain_) {
      throw ConfigError(fmt::format("[tau2] {} is not a task of {}", name_of(key), domain_));
    }
    leave();
    calls_.clear();
    begun_ = about_tasks("reset", domain_, key.split, file_);
    begun_.update({{"task", key.id}, {"solo", solo_ == Solo::Yes}});
    const auto answer = begin();
    return reading([&] {
      Scene scene{.task = key,
                  .policy = text_of(answer, "policy"),
                  .scenario = text_of(answer, "scenario"),
                  .guidelines = text_of(answer, "guidelines"),
                  .ticket = text_of(answer, "ticket"),
                  .tools = schemas(answer.at("tools")),
                  .user_tools = schemas(answer.at("user_tools"))};
      if (solo_ == Solo::Yes) {
        scene.tools.emplace_back(kDone);
        scene.stop_tool = "done";
      } else {
        scene.history = {{.role = Role::Assistant, .content = "Hi! How can I help you today?"}};
      }
      return scene;
    });
  }

  Message call(const ToolCall& call) override {
    const Json request = {{"op", "call"}, {"call", call_json(call)}};
    const auto answer = ask(request);
    return reading([&] {
      calls_.emplace_back(request, answer.at("content"));
      return Message{
          .role = Role::Tool,
          .content = answer.at("content").is_null() ? "" : answer.at("content").get<std::string>(),
          .call_id = call.id,
          .error = answer.at("error").get<bool>(),
          .by = call.by};
    });
  }

  Reward evaluate(std::span<const Message> log, End why) override {
    const auto answer = ask({{"op", "reward"},
                             {"messages", messages_json(log, solo_)},
                             {"why", std::string(name_of(why))}});
    return reading([&] {
      Reward reward{.value = answer.at("reward").get<double>(), .note = text_of(answer, "note")};
      for (const auto& [name, value] : answer.at("breakdown").items()) {
        reward.parts[name] = value.get<double>();
      }
      return reward;
    });
  }

  std::string state_hash() const override {
    return sha256(const_cast<Tau2Environment*>(this)->ask({{"op", "hash"}})["hash"].dump());
  }

 private:
  bool is_there() const { return generation_ == child_->generation() && child_->runs(); }

  // Under a name that no world of any process has had. Without one there is no world.
  Json begin() {
    session_.clear();
    const auto name = child_->new_session();
    Json request = begun_;
    request["sid"] = name;
    auto answer = child_->ask(std::move(request));
    generation_ = child_->generation();
    session_ = name;
    return answer;
  }

  // Its process ended at the request of another world. What was called is called again: tau2's
  // tools depend on nothing but the world, and its rewards compute them again in the same way.
  void come_back() {
    begin();
    for (auto [request, content] : calls_) {
      request["sid"] = session_;
      if (child_->ask(std::move(request))["content"] == content) continue;
      leave();
      throw EnvironmentError("[tau2] a tool did not return again what it had returned");
    }
  }

  Json ask(Json request) {
    if (session_.empty()) throw EnvironmentError("[tau2] the process with this world has ended");
    try {
      if (!is_there()) come_back();
      request["sid"] = session_;
      return child_->ask(std::move(request));
    } catch (const EnvironmentError&) {
      // A request that ends a process would end the next one, too.
      if (!child_->runs()) session_.clear();
      throw;
    }
  }

  void leave() {
    const auto name = std::exchange(session_, {});
    if (name.empty() || !is_there()) return;
    try {
      child_->ask({{"op", "close"}, {"sid", name}});
    } catch (const EnvironmentError&) {
      // It has died, and its worlds with it.
    }
  }

  std::string domain_;
  std::shared_ptr<Tau2Bridge::Child> child_;
  Solo solo_;
  Tau2TaskFile file_;
  std::string session_;
  int64_t generation_ = 0;
  Json begun_;                                // the request that began the world
  std::vector<std::pair<Json, Json>> calls_;  // since then, with what they returned
};

}  // namespace

Tau2Domain::Tau2Domain(std::string_view name, Tau2Bridge bridge, Solo solo, Tau2TaskFile file)
    : name_(name), child_(std::move(bridge.child_)), solo_(solo), file_(std::move(file)) {
  if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
    throw ConfigError(fmt::format("[tau2] domain '{}' is none of airline, retail, telecom", name));
  }
  if (solo == Solo::Yes && name != "telecom") {
    throw ConfigError(fmt::format("[tau2] {} has no solo mode: only telecom has", name));
  }
  std::error_code none;
  if (!file_.path.empty() && !std::filesystem::is_regular_file(file_.path, none)) {
    throw ConfigError(fmt::format("[tau2] {}: there is no such file of tasks", file_.path));
  }
}

std::string Tau2Domain::name() const { return name_; }

std::vector<TaskKey> Tau2Domain::tasks(std::string_view split) const {
  if (split != "train" && split != "test" && split != "all") {
    throw ConfigError(fmt::format("[tau2] split '{}' is none of train, test, all", split));
  }
  const std::string theirs = split == "all" ? "base" : std::string(split);
  const Json request = about_tasks("tasks", name_, theirs, file_);
  Json answer;
  try {
    answer = child_->ask(request);
  } catch (const EnvironmentError& error) {
    if (file_.path.empty()) throw;
    throw ConfigError(fmt::format("{} (tasks of {})", error.what(), file_.path));
  }
  return reading([&] {
    std::vector<TaskKey> keys;
    for (const auto& id : answer.at("ids")) {
      keys.push_back({.domain = name_, .split = theirs, .id = id.get<std::string>()});
    }
    if (file_.path.empty() || split == "all") return keys;
    const auto first_test = keys.begin() + std::min(file_.learning, std::ssize(keys));
    split == "train" ? keys.erase(first_test, keys.end()) : keys.erase(keys.begin(), first_test);
    return keys;
  });
}

std::unique_ptr<Environment> Tau2Domain::make() const {
  return std::make_unique<Tau2Environment>(name_, child_, solo_, file_);
}

std::vector<ToolCall> Tau2Domain::gold_calls(const TaskKey& key) const {
  const auto answer = gold(*child_, key, file_);
  return reading([&] {
    std::vector<ToolCall> calls;
    for (const auto& action : answer.at("actions")) {
      calls.push_back({.id = fmt::format("g{}", calls.size()),
                       .name = action.at("name").get<std::string>(),
                       .arguments = python_json(action.at("arguments")),
                       .by = action.at("requestor") == "user" ? Party::User : Party::Agent});
    }
    return calls;
  });
}

std::vector<std::string> Tau2Domain::told(const TaskKey& key) const {
  const auto answer = gold(*child_, key, file_);
  return reading([&] { return answer.at("told").get<std::vector<std::string>>(); });
}

Message Tau2ScriptedUser::next(const Scene& scene, std::span<const Message> log, uint64_t) {
  if (log.empty()) {
    const std::string_view scenario = scene.scenario;
    const size_t reason = scenario.find("Reason for call:");
    return {.content = std::string(scenario.substr(reason == scenario.npos ? 0 : reason))};
  }
  const bool asks = log.back().content.find('?') != std::string::npos;
  return {.content = std::string(asks ? "Yes." : kStop)};
}

}  // namespace lockstep::rl

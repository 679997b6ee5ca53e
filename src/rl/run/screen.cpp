#include "rl/run/screen.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/core/shard.h"

namespace lockstep::rl {
namespace {

constexpr std::chrono::milliseconds kOnTerminal{200}, kElsewhere{60'000};
constexpr const char* kErase = "\x1b[K";  // to the line's end

}  // namespace

Screen::Screen(bool is_on, std::FILE* out, const train::TextStyle& style,
               std::function<Clock::time_point()> now)
    : is_on_(is_on),
      out_(out),
      style_(style),
      now_(std::move(now)),
      next_(now_() + (style.rewrites ? kOnTerminal : kElsewhere)) {}

void Screen::print(const std::string& line) {
  if (!is_on_) return;
  std::fprintf(out_, "%s%s\n", std::exchange(is_open_, false) ? kErase : "", line.c_str());
  std::fflush(out_);
}

bool Screen::is_due() const { return is_on_ && now_() >= next_; }

void Screen::progress(const std::string& line) {
  if (!is_due()) return;
  next_ = now_() + (style_.rewrites ? kOnTerminal : kElsewhere);
  if (!style_.rewrites) return print(line);
  const auto width = static_cast<size_t>(style_.width);
  const std::string fits = width > 0 ? line.substr(0, width - 1) : line;
  std::fprintf(out_, "%s%s\r", fits.c_str(), kErase);
  std::fflush(out_);
  is_open_ = true;
}

RolloutLine::RolloutLine(Screen& screen, std::string what, const RolloutPlan& plan,
                         const comm::Group& group)
    : screen_(screen), what_(std::move(what)) {
  const auto lanes = Shard{group.rank(), group.size()}.of(plan.lanes);
  for (int64_t i = 0; i < std::ssize(plan.episodes); ++i) {
    const int64_t lane = plan.lane_of(i);
    before_.episodes += lane >= lanes.begin && lane < lanes.end;
  }
  what_ += group.size() > 1 ? ": rank 0 has played" : ": played";
}

void RolloutLine::show(const RolloutProgress& lane) {
  if (!screen_.is_due()) return;
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin_;
  screen_.progress(fmt::format("{} {} of {} episodes, {:.0f} tokens/s", what_,
                               before_.over + lane.over, before_.episodes,
                               static_cast<double>(before_.tokens + lane.tokens) / taken.count()));
}

void RolloutLine::add(const std::vector<Played>& lane) {
  for (const auto& one : lane) {
    ++before_.over;
    before_.tokens += one.own_tokens();
  }
}

}  // namespace lockstep::rl

#include "lockstep/models/dialogues.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>

#include "lockstep/core/error.h"
#include "models/evaluation_mode.h"
#include "models/sampling.h"

namespace lockstep::models {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw ConfigError("[transformer] dialogues: " + what);
}

class Dialogues {
 public:
  Dialogues(Transformer& net, const std::vector<DialogueSeat>& given,
            const DialogueOptions& options)
      : net_(*net), given_(given), options_(options), out_(given.size()) {
    const auto& o = options.sampling;
    if (o.max_new_tokens < 1 || !(o.temperature >= 0) || o.top_k < 0 ||
        !(o.top_p > 0 && o.top_p <= 1) || options.rows < 1 || options.chunk < 1) {
      fail(fmt::format(
          "max_new_tokens = {}, temperature = {}, top_k = {}, top_p = {}, rows = {}, "
          "chunk = {}: temperature and top_k are 0 or more, top_p is in (0, 1], the "
          "others are above 0",
          o.max_new_tokens, o.temperature, o.top_k, o.top_p, options.rows, options.chunk));
    }
    if (o.vocabulary < 0) fail(fmt::format("vocabulary = {}: it is 0 or more", o.vocabulary));
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i].dialogue == nullptr) fail(fmt::format("the dialogue {} is a null pointer", i));
    }
    if (options.context < 2 || options.context > net_.options.max_length) {
      fail(fmt::format("context = {}: from 2 to the model's max_length = {}", options.context,
                       net_.options.max_length));
    }
    vocabulary_ = o.vocabulary > 0 ? std::min(o.vocabulary, net_.options.vocabulary)
                                   : net_.options.vocabulary;
  }

  std::vector<DialogueTokens> run() {
    if (given_.empty()) return {};
    const at::InferenceMode no_grad;
    const EvaluationMode evaluation(net_);
    begin_first();
    while (!rows_.empty()) {
      write_messages();
      answer_messages();
    }
    return std::move(out_);
  }

 private:
  struct Row {
    size_t number = 0;             // of the dialogue
    std::vector<int32_t> pending;  // tokens that are not in the cache yet
    size_t message = 0;            // where the message begins
    Written how = Written::Complete;
    bool writing = false;
  };

  // The program's functions have gradients and InferenceMode as the caller of hold_dialogues().
  template <class Call>
  auto as_called(const Call& call) const {
    const c10::InferenceMode inference(inference_);
    const at::AutoGradMode grad(grad_);
    return call();
  }

  DialogueTokens& tokens(const Row& row) { return out_[row.number]; }

  void add(const Row& row, std::span<const int32_t> ids, bool own) {
    for (const int32_t id : ids) {
      if (id < 0 || id >= net_.options.vocabulary) {
        fail(fmt::format("the dialogue {} has the token {}; the vocabulary is {}", row.number, id,
                         net_.options.vocabulary));
      }
    }
    auto& to = tokens(row);
    to.ids.insert(to.ids.end(), ids.begin(), ids.end());
    to.own.insert(to.own.end(), ids.size(), own ? 1 : 0);
  }

  Row next_row() {
    Row row{.number = next_++};
    row.pending = as_called([&] { return given_[row.number].dialogue->begin(); });
    if (row.pending.empty() || static_cast<int64_t>(row.pending.size()) >= options_.context) {
      fail(fmt::format("dialogue {} begins with {} tokens; the context is {}", row.number,
                       row.pending.size(), options_.context));
    }
    add(row, row.pending, false);
    return row;
  }

  // Equal beginnings next to each other are computed once.
  void begin_first() {
    const auto seats = std::min(static_cast<size_t>(options_.rows), given_.size());
    std::vector<Row> all;
    std::vector<int64_t> of;
    for (size_t i = 0; i < seats; ++i) {
      all.push_back(next_row());
      if (i == 0 || all[i].pending != rows_.back().pending) rows_.push_back(all[i]);
      of.push_back(static_cast<int64_t>(rows_.size()) - 1);
    }
    // What fills up a row after its end needs a place, too.
    cache_.emplace(net_.make_cache(static_cast<int64_t>(rows_.size()),
                                   options_.context + std::min(options_.context, options_.chunk)));
    last_ = at::zeros({static_cast<int64_t>(rows_.size()), net_.options.hidden},
                      net_.head_weight().options().requires_grad(false));
    read_pending();
    for (auto& row : all) row.pending.clear();
    if (all.size() != rows_.size()) keep(of);
    rows_ = std::move(all);
  }

  void keep(const std::vector<int64_t>& rows) {
    cache_->keep(rows);
    last_ = last_.index_select(0, on_device(at::tensor(rows, at::kLong)));
  }

  at::Tensor on_device(const at::Tensor& tensor) const {
    return tensor.to(net_.head_weight().device());
  }

  // Takes up to `width` pending tokens of each row into the cache. Those that have fewer are filled
  // up at the end; what the cache then holds there is written over by what comes next.
  void read(int64_t width) {
    const auto n = static_cast<int64_t>(rows_.size());
    auto lengths = cache_->lengths();
    at::Tensor ids = at::zeros({n, width}, at::kLong);
    auto* data = ids.mutable_data_ptr<int64_t>();
    std::vector<int64_t> taken;
    for (int64_t i = 0; i < n; ++i) {
      const auto& pending = rows_[static_cast<size_t>(i)].pending;
      taken.push_back(std::min<int64_t>(width, static_cast<int64_t>(pending.size())));
      std::copy_n(pending.begin(), taken.back(), data + i * width);
    }
    const at::Tensor hidden = net_.hidden(on_device(ids), *cache_);
    std::vector<int64_t> ends, rows;
    for (int64_t i = 0; i < n; ++i) {
      auto& pending = rows_[static_cast<size_t>(i)].pending;
      const auto count = taken[static_cast<size_t>(i)];
      lengths[static_cast<size_t>(i)] += count;
      pending.erase(pending.begin(), pending.begin() + count);
      if (count == 0 || !pending.empty()) continue;
      ends.push_back(i * width + count - 1);
      rows.push_back(i);
    }
    const at::Tensor picked =
        hidden.flatten(0, 1).index_select(0, on_device(at::tensor(ends, at::kLong)));
    last_.index_copy_(0, on_device(at::tensor(rows, at::kLong)), picked);
    cache_->set_lengths(std::move(lengths));
  }

  void read_pending() {
    for (;;) {
      size_t longest = 0;
      for (const auto& row : rows_) longest = std::max(longest, row.pending.size());
      if (longest == 0) return;
      read(std::min(options_.chunk, static_cast<int64_t>(longest)));
    }
  }

  void write_messages() {
    for (auto& row : rows_) {
      row.message = tokens(row).ids.size();
      row.writing = true;
    }
    for (;;) {
      if (options_.check) as_called([&] { options_.check(); });
      draw();
      const bool done =
          std::none_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.writing; });
      if (done) return;
      read(1);
    }
  }

  // A token for each row that is writing. It is pending until the next read(), or the answer's.
  void draw() {
    std::vector<Row*> writing;
    std::vector<int64_t> places;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (!rows_[i].writing) continue;
      writing.push_back(&rows_[i]);
      places.push_back(static_cast<int64_t>(i));
    }
    const at::Tensor last = last_.index_select(0, on_device(at::tensor(places, at::kLong)));
    const at::Tensor logits = net_.head(last).slice(1, 0, vocabulary_);
    const at::Tensor rows = logits.to(at::kCPU, at::kFloat).contiguous();
    const auto& sampling = options_.sampling;
    for (size_t i = 0; i < writing.size(); ++i) {
      Row& row = *writing[i];
      const std::span logits_of_row(
          rows.const_data_ptr<float>() + static_cast<int64_t>(i) * vocabulary_,
          static_cast<size_t>(vocabulary_));
      const auto position = static_cast<int64_t>(tokens(row).ids.size());
      const double u =
          sampling.temperature == 0 ? 0 : uniform(given_[row.number].seed, 0, position);
      const int32_t token = sample_token(logits_of_row, sampling, u);
      add(row, std::span(&token, 1), true);
      row.pending = {token};
      const auto written = static_cast<int64_t>(tokens(row).ids.size() - row.message);
      const bool stops =
          std::find(sampling.stop.begin(), sampling.stop.end(), token) != sampling.stop.end();
      row.writing = false;
      if (stops) {
        row.how = Written::Complete;
      } else if (written == sampling.max_new_tokens) {
        row.how = Written::TooLong;
      } else if (position + 1 == options_.context) {
        row.how = Written::ContextFull;
      } else {
        row.writing = true;
      }
    }
  }

  void answer_messages() {
    std::vector<bool> over;
    for (auto& row : rows_) over.push_back(!is_answered(row));
    std::vector<int64_t> kept;
    std::vector<Row> rows;
    auto lengths = cache_->lengths();
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (over[i] && next_ < given_.size()) {
        rows_[i] = next_row();
        lengths[i] = 0;
        over[i] = false;
      }
      if (over[i]) continue;
      kept.push_back(static_cast<int64_t>(i));
      rows.push_back(std::move(rows_[i]));
    }
    cache_->set_lengths(std::move(lengths));
    if (kept.size() < rows_.size() && !kept.empty()) keep(kept);
    rows_ = std::move(rows);
    read_pending();
  }

  bool is_answered(Row& row) {
    Dialogue& dialogue = *given_[row.number].dialogue;
    const std::span<const int32_t> message = std::span(tokens(row).ids).subspan(row.message);
    // The message is copied: the answer is put after it in the same memory.
    const std::vector<int32_t> written(message.begin(), message.end());
    const auto answer = as_called([&] { return dialogue.answer(written, row.how); });
    if (answer.empty() || row.how == Written::ContextFull) return false;
    if (static_cast<int64_t>(tokens(row).ids.size() + answer.size()) >= options_.context) {
      as_called([&] { dialogue.answer({}, Written::ContextFull); });
      return false;
    }
    add(row, answer, false);
    row.pending.insert(row.pending.end(), answer.begin(), answer.end());
    return true;
  }

  TransformerImpl& net_;
  const std::vector<DialogueSeat>& given_;
  const DialogueOptions& options_;
  const bool inference_ = c10::InferenceMode::is_enabled(), grad_ = at::GradMode::is_enabled();
  std::vector<DialogueTokens> out_;
  std::vector<Row> rows_;
  std::optional<KvCache> cache_;
  at::Tensor last_;  // rows x hidden: of each row's last token
  size_t next_ = 0;
  int64_t vocabulary_ = 0;
};

}  // namespace

std::vector<DialogueTokens> hold_dialogues(Transformer& net,
                                           const std::vector<DialogueSeat>& dialogues,
                                           const DialogueOptions& options) {
  return Dialogues(net, dialogues, options).run();
}

}  // namespace lockstep::models

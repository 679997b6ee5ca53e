// Token files as samples of a language model.
//
//   const data::TokenDataset corpus("corpus/", {.sequence_length = 256});
//   Loader loader(corpus, world, {.batch_size = 8});
//   for (auto [ids, targets] : loader.epoch(0)) ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/text/token_files.h"

namespace lockstep::data {

// Options of a TokenDataset.
struct TokenDatasetOptions {
  int64_t sequence_length = 256;
  text::TokenType type = text::TokenType::Uint16;  // of a single file
  // Whether the first token of a document is left out of the targets (-100), since the document
  // before it does not predict it. Documents are packed: a sequence may hold several, and attention
  // sees them all.
  bool mask_boundaries = false;
  // Only these samples, from `first` on; 0: all. For a part that is kept for evaluation.
  int64_t first = 0;
  int64_t count = 0;
};

// Sample i are the tokens [i L, i L + L) of a file and, as target, those one further on: int64, n x
// L each. Each file is a row of sequences that do not overlap; up to L tokens at its end are left
// out. The Loader shuffles sequences, and so chunks of the corpus, and resumes exactly. Files are
// mapped: nothing is read before it is needed, and all ranks of a host share the pages.
class TokenDataset : public Dataset {
 public:
  // Throws ConfigError for impossible options, DataError as TokenFiles::open() and when there is no
  // whole sequence.
  explicit TokenDataset(const std::string& path, const TokenDatasetOptions& options = {});

  int64_t size() const override { return count_; }
  Batch get_batch(at::IntArrayRef indices) const override { return refill({}, indices); }
  Batch refill(Batch spare, at::IntArrayRef indices) const override;

  // The files it reads.
  const text::TokenFiles& files() const { return files_; }

 private:
  text::TokenFiles files_;
  TokenDatasetOptions options_;
  std::vector<int64_t> begins_;  // of each file's first sample, and the number of all
  int64_t count_ = 0;
};

}  // namespace lockstep::data

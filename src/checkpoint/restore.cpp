#include "checkpoint/restore.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "checkpoint/format/checksum.h"
#include "checkpoint/in_threads.h"
#include "checkpoint/loads.h"
#include "checkpoint/part_of.h"
#include "checkpoint/stored_view.h"
#include "comm/text.h"
#include "comm/transport.h"
#include "core/process/cores.h"
#include "lockstep/core/environment.h"

namespace lockstep::checkpoint {
namespace {

// Of what expand() repeats in memory the first is read.
void leave_repeats_out(Part& part) {
  for (int64_t d = 0; d < part.tensor.dim(); ++d) {
    if (part.tensor.stride(d) != 0 || part.tensor.size(d) < 2) continue;
    part.tensor = part.tensor.narrow(d, 0, 1);
    part.box.size[static_cast<size_t>(d)] = 1;
  }
}

// What of a map has a prefix, without it.
template <class T, class Convert>
auto below(const std::map<std::string, T>& all, const std::string& prefix, const Convert& convert) {
  std::map<std::string, decltype(convert(all.begin()->second))> own;
  for (auto i = all.lower_bound(prefix); i != all.end() && i->first.starts_with(prefix); ++i) {
    own.emplace(i->first.substr(prefix.size()), convert(i->second));
  }
  return own;
}

std::string text_of(at::ScalarType dtype, const Sizes& sizes) {
  return fmt::format("{} [{}]", comm::name_of(dtype), fmt::join(sizes, ", "));
}

bool is_list(const Value& value) { return value.index() >= 4; }

constexpr int kMostThreads = 4;  // more than that wait for memory and the disk

// As many as are worth starting.
int threads_for(int64_t bytes) {
  constexpr int64_t kEnough = 4 << 20;  // takes 1 ms, a thread to start 0.03
  return static_cast<int>(std::min<int64_t>(kMostThreads, 1 + bytes / kEnough));
}

// This rank's part of the cores that it may use, as far as it knows for how many ranks they are;
// or what it computes with, where that is more (it may be bound to cores of its own). With
// OMP_NUM_THREADS=1, too: bytes are the same in any number of threads.
int own_threads(int ranks) {
  int64_t threads = at::get_num_threads();
  const auto here = env_int("LOCAL_WORLD_SIZE", 1, std::numeric_limits<int32_t>::max());
  if (here || ranks == 1) {
    threads = std::max(threads, static_cast<int64_t>(allowed_cores().size()) / here.value_or(1));
  }
  return static_cast<int>(std::clamp<int64_t>(threads, 1, kMostThreads));
}

}  // namespace

Restore::Restore(const Tracked& tracked, EachRank each_rank, const RestoreOptions& options,
                 FileSystem& files, int ranks)
    : tracked_(tracked),
      each_rank_(std::move(each_rank)),
      options_(options),
      files_(files),
      ranks_(ranks),
      threads_(own_threads(ranks)) {}

Restore::Outcome Restore::prepare(const std::string& folder) {
  Fault kind = Fault::Damaged;
  try {
    checkpoint_.emplace(folder, files_);
    kind = Fault::Other;
    compare();
    if (!faults_.empty()) {
      constexpr size_t kMost = 20;
      const size_t shown = std::min(faults_.size(), kMost);
      return {kind, fmt::format("[checkpoint] {} does not fit what is tracked:\n    {}{}", folder,
                                fmt::join(faults_.begin(), faults_.begin() + shown, "\n    "),
                                shown < faults_.size()
                                    ? fmt::format("\n    and {} more", faults_.size() - shown)
                                    : "")};
    }
    kind = Fault::Damaged;
    plan();
    verify();
    const std::string bytes = hex(checksum(to_json(manifest())));
    return {Fault::None, fmt::format("{}step {} of {}, whose manifest has the checksum {}", bytes,
                                     manifest().step, folder, bytes)};
  } catch (...) {
    return {kind, comm::thrown_text()};
  }
}

const std::string* Restore::primary(const std::string& name) const {
  const auto tensor = manifest().tensors.find(name);
  if (tensor != manifest().tensors.end()) return &tensor->first;
  const auto alias = manifest().aliases.find(name);
  return alias == manifest().aliases.end() ? nullptr : &alias->second;
}

void Restore::compare() {
  Names names = names_of(tracked_);
  names.add_aliases(manifest().aliases);
  for (const auto& [name, object] : tracked_) {
    const std::string prefix = name + "/";
    Saved saved{
        .tensors = below(manifest().tensors, prefix,
                         [](const ManifestTensor& tensor) {
                           return Saved::Tensor{scalar_type_of(tensor.dtype), tensor.sizes};
                         }),
        .values = below(manifest().values, prefix, [](const Value& value) { return value; }),
        .world = manifest().world};
    for (const auto& [alias, target] :
         below(manifest().aliases, prefix, [](const std::string& text) { return text; })) {
      const auto& tensor = manifest().tensors.at(target);
      saved.tensors[alias] = {scalar_type_of(tensor.dtype), tensor.sizes};
    }
    add_own(prefix, saved);
    const c10::InferenceMode normal(false);  // the states that are made here are trained outside
    Wanted wanted{object.get(), object->destination(saved, names),
                  !saved.tensors.empty() || !saved.values.empty()};
    compare(prefix, wanted);
    compare_values(prefix, wanted);
    wanted_.push_back(std::move(wanted));
  }
  find_unexpected();
}

std::string Restore::own_name(const std::string& name) const {
  return EachRank::name_of(name, each_rank_.rank % manifest().world);
}

// What is this rank's own is there by its plain name, too.
void Restore::add_own(const std::string& prefix, Saved& saved) {
  Saved own;
  for (const auto& [name, tensor] : saved.tensors) {
    const auto slash = name.rfind("/rank-");
    if (slash == std::string::npos) continue;
    const std::string plain = name.substr(0, slash), path = prefix + plain;
    if (each_rank_.has(path) && own_name(path) == prefix + name) own.tensors[plain] = tensor;
  }
  saved.tensors.merge(own.tensors);
}

// The tensor of the manifest that a piece is read from: under its own name or, where that is not
// there, under another that it has here.
const std::string* Restore::stored(const std::string& piece, Held held,
                                   const std::vector<std::string>& aliases) {
  const auto find = [&](const std::string& name) {
    if (held == Held::ByAll && (each_rank_.has(piece) || each_rank_.has(name))) {
      if (const std::string* own = primary(own_name(name))) {
        others_.push_back(pattern_of(name) + "/rank-*");
        return own;
      }
    }
    return primary(name);
  };
  const std::string* found = find(piece);
  for (size_t i = 0; i < aliases.size() && found == nullptr; ++i) found = find(aliases[i]);
  return found;
}

void Restore::compare(const std::string& prefix, Wanted& wanted) {
  for (const auto& pattern : wanted.state.others) others_.push_back(pattern_of(prefix) + pattern);
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& [alias, target] : wanted.state.aliases) {
    aliases[prefix + target].push_back(prefix + alias);
  }
  std::erase_if(wanted.state.pieces, [&](Piece& piece) {
    const std::string path = prefix + piece.name;
    const std::string* name = stored(path, piece.held, aliases[path]);
    aliases.erase(path);
    if (name == nullptr) {
      if (!matches_with_object(path, options_.allow_missing)) {
        faults_.push_back(
            fmt::format("{} is missing: {} here", path, text_of(piece.dtype, piece.sizes)));
      }
      return true;
    }
    used_.insert(*name);
    const auto& saved = manifest().tensors.at(*name);
    if (saved.sizes != piece.sizes || saved.dtype != dtype_of(piece.dtype)) {
      faults_.push_back(fmt::format("{} differs: {} there, {} here", path,
                                    text_of(scalar_type_of(saved.dtype), saved.sizes),
                                    text_of(piece.dtype, piece.sizes)));
    }
    if (const auto why = fault_of_parts(piece); !why.empty()) {
      faults_.push_back(fmt::format("{} cannot be written to here: {}", path, why));
      return true;
    }
    for (auto& part : piece.parts) {
      leave_repeats_out(part);
      if (const auto why = obstacle_to_writing(part.tensor); !why.empty()) {
        faults_.push_back(fmt::format("{} cannot be written to here: {}", path, why));
      }
    }
    wanted.from.push_back(name);
    return false;
  });
  for (const auto& [target, others] : aliases) {  // of what other ranks read
    if (primary(target)) continue;
    const auto found =
        std::ranges::find_if(others, [&](const std::string& other) { return primary(other); });
    if (found != others.end()) used_.insert(*primary(*found));
  }
}

void Restore::compare_values(const std::string& prefix, Wanted& wanted) {
  for (auto& [key, value] : wanted.state.values) {
    const std::string name = prefix + key;
    const auto saved = manifest().values.find(name);
    if (saved == manifest().values.end()) {
      if (!matches_with_object(name, options_.allow_missing)) {
        faults_.push_back(fmt::format("value {} is missing", name));
      }
      continue;  // keeps what it is
    }
    used_.insert(name);
    if (saved->second.index() != value.index() && !(is_list(saved->second) && is_list(value))) {
      faults_.push_back(fmt::format("value {} is of another type there", name));
    }
    value = saved->second;
  }
}

void Restore::find_unexpected() {
  const auto look = [&](const std::string& name, const char* kind) {
    if (used_.contains(name) || matches(name, others_) ||
        matches_with_object(name, options_.allow_unexpected)) {
      return;
    }
    faults_.push_back(fmt::format("{}{} is unexpected: nothing here has that name", kind, name));
  };
  for (const auto& [name, tensor] : manifest().tensors) look(name, "");
  for (const auto& [name, value] : manifest().values) {
    if (!name.ends_with(std::string("/") + kHookIsThere)) look(name, "value ");
  }
}

void Restore::plan() {
  for (const auto& wanted : wanted_) {
    for (size_t i = 0; i < wanted.from.size(); ++i) {
      const Piece& piece = wanted.state.pieces[i];
      const auto& [name, tensor] = *manifest().tensors.find(*wanted.from[i]);
      for (const auto& part : piece.parts) {
        if (part.tensor.numel() == 0) continue;
        for (const auto& box : tensor.boxes) {
          if (!intersection(part.box, box.box)) continue;
          checkpoint_->prepare(box.file);
          reads_.push_back({&name, &box, piece.dtype, &part});
        }
      }
    }
  }
}

// In the order of the files, so that a disk reads on from where it is. Nothing is asked for in
// advance: MADV_WILLNEED reads in single pages, which are slower to map for as long as they are
// cached, and gained nothing from a disk (docs/log/2026-11.md).
void Restore::verify() {
  std::map<std::pair<const char*, const ManifestBox*>, const Read*> boxes;
  int64_t bytes = 0;
  for (const auto& read : reads_) {
    const std::string_view box = checkpoint_->bytes(*read.tensor, *read.from);
    if (boxes.emplace(std::pair(box.data(), read.from), &read).second) {
      bytes += static_cast<int64_t>(box.size());
    }
  }
  std::vector<const Read*> list;
  for (const auto& [place, read] : boxes) list.push_back(read);
  const auto count = static_cast<int64_t>(list.size());
  const int threads = std::min(threads_, threads_for(bytes));
  // Each thread of each rank begins elsewhere: what another has read is in the page cache.
  const auto first = Shard{each_rank_.rank, int64_t{ranks_} * threads}.of(count).begin;
  std::rotate(list.begin(), list.begin() + first, list.end());
  in_threads(count, threads,
             [&](int64_t i) { checkpoint_->check(*list[i]->tensor, *list[i]->from); });
}

// What is one piece of memory on both sides is left to be copied `later`; anything else is copied
// at once.
void Restore::fill(const Read& read, std::vector<Copy>& later) {
  const std::string_view bytes = checkpoint_->bytes(*read.tensor, *read.from);
  const Box& box = read.from->box;
  const bool is_complex = c10::isComplexType(read.dtype);
  Sizes sizes = box.size;
  if (is_complex) sizes.push_back(2);
  const auto plain = is_complex ? c10::toRealValueType(read.dtype) : read.dtype;
  at::Tensor from = at::from_blob(const_cast<char*>(bytes.data()), sizes, at::dtype(plain));
  if (is_complex) from = at::view_as_complex(from);
  const Box common = *intersection(read.to->box, box);
  const auto within = [&common](const Box& outer) {
    Box inner = common;
    for (size_t d = 0; d < inner.offset.size(); ++d) inner.offset[d] -= outer.offset[d];
    return inner;
  };
  const at::Tensor to = narrowed(read.to->tensor, within(read.to->box));
  from = narrowed(from, within(box));
  if (!to.is_cpu() || !to.is_contiguous() || !from.is_contiguous() || to.is_conj() || to.is_neg()) {
    to.copy_(from);
    return;
  }
  constexpr size_t kPiece = 4 << 20;
  char* memory = static_cast<char*>(to.mutable_data_ptr());
  // As copy_() does: a backward pass that needs what was there says so.
  if (!to.is_inference()) to.unsafeGetTensorImpl()->bump_version();
  const char* source = static_cast<const char*>(from.const_data_ptr());
  for (size_t i = 0; i < to.nbytes(); i += kPiece) {
    later.push_back({memory + i, source + i, std::min(kPiece, to.nbytes() - i)});
  }
}

void Restore::finish() {
  const auto tell = [&](bool with_tensors) {
    for (auto& wanted : wanted_) {
      if (wanted.any && wanted.state.pieces.empty() != with_tensors) {
        wanted.object->restored(wanted.state);
      }
    }
  };
  tell(false);
  ++loads();
  {
    const at::NoGradGuard no_grad;
    std::vector<Copy> copies;
    for (const auto& read : reads_) fill(read, copies);
    int64_t bytes = 0;
    for (const auto& copy : copies) bytes += static_cast<int64_t>(copy.bytes);
    in_threads(static_cast<int64_t>(copies.size()), std::min(threads_, threads_for(bytes)),
               [&](int64_t i) { std::memcpy(copies[i].to, copies[i].from, copies[i].bytes); });
  }
  tell(true);
}

}  // namespace lockstep::checkpoint

// Any bytes as a file of torch.save, and as the pickle in one that is whole otherwise:
// parse_torch_file returns tensors that can be read, or throws CheckpointError.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "checkpoint/format/tensor_files/tensor_kinds.h"
#include "checkpoint_format/torch_zip.h"
#include "lockstep/checkpoint/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  using namespace lockstep::checkpoint;
  const std::string text(reinterpret_cast<const char*>(bytes), count);
  const std::string pickled = lockstep::test::zip_of(
      {{"x/data.pkl", text}, {"x/data/0", std::string(24, 'x')}, {"x/byteorder", "little"}});
  for (const std::string& archive : {text, pickled}) {
    try {
      const auto file = parse_torch_file(archive, "fuzz");
      for (const auto& [name, tensor] : file->tensors()) {
        if (bytes_of(tensor) > 1 << 20) continue;  // expanded
        const auto read = file->read(name);
        if (static_cast<int64_t>(read.view().size()) != bytes_of(tensor)) std::abort();
        volatile char last = read.view().empty() ? '\0' : read.view().back();
        static_cast<void>(last);
      }
      for (const auto& [alias, name] : file->aliases()) {
        if (!file->tensors().contains(name)) std::abort();
      }
      file->verify();
    } catch (const lockstep::CheckpointError&) {
    }
  }
  return 0;
}

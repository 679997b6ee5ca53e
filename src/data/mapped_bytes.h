// A file's bytes, mapped. Free of torch.
#pragma once

#include <filesystem>
#include <string_view>

namespace lockstep::data {

class MappedBytes {
 public:
  // Throws DataError that begins with `address` and names the file when it cannot be read, is not a
  // regular file, or is empty.
  MappedBytes(const std::filesystem::path& file, std::string_view address);
  ~MappedBytes();
  MappedBytes(const MappedBytes&) = delete;
  MappedBytes& operator=(const MappedBytes&) = delete;

  // Valid as long as this. The file must not be truncated meanwhile.
  std::string_view view() const { return bytes_; }

 private:
  std::string_view bytes_;
};

}  // namespace lockstep::data

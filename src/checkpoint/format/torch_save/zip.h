// Zip archives whose records are stored as they are, as torch.save writes them; what is compressed
// in them, such as TorchScript's code, is not read.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

struct ZipRecord {
  std::string_view bytes;
  uint32_t crc = 0;  // CRC-32 of the record, as the archive says
  bool compressed = false;
};

// The records of an archive by name. They lie in `archive` and do not overlap; zip64 or not. Throws
// CheckpointError that begins with `where` for anything else: encrypted records, parts of an
// archive, names that come twice, places that lie outside.
// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
std::map<std::string, ZipRecord> parse_zip(std::string_view archive, std::string_view where);

// Of a record's bytes.
uint32_t crc32_of(std::string_view bytes);

}  // namespace lockstep::checkpoint

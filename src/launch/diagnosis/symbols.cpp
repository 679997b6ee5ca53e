#include "launch/diagnosis/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "core/files/fd.h"

namespace lockstep::launch {
namespace {

constexpr uint64_t kLargestTable = 256 << 20;  // libtorch's has some 20 MB
constexpr uint64_t kLongestName = 4096;

template <class Part>
std::optional<Part> part_at(const ReadAt& read, uint64_t offset) {
  const std::string bytes = read(offset, sizeof(Part));
  if (bytes.size() != sizeof(Part)) return std::nullopt;
  Part part;
  std::memcpy(&part, bytes.data(), sizeof part);
  return part;
}

std::string readable(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

// What of one symbol table is the nearest below each address.
void search(const ReadAt& read, const Elf64_Shdr& table, const Elf64_Shdr& names,
            const std::vector<uint64_t>& addresses, std::vector<std::string>& found) {
  if (table.sh_size > kLargestTable) return;
  const std::string bytes = read(table.sh_offset, table.sh_size);
  std::vector<std::optional<Elf64_Sym>> best(addresses.size());
  for (size_t at = 0; at + sizeof(Elf64_Sym) <= bytes.size(); at += sizeof(Elf64_Sym)) {
    Elf64_Sym symbol;
    std::memcpy(&symbol, bytes.data() + at, sizeof symbol);
    if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_shndx == SHN_UNDEF) continue;
    for (size_t i = 0; i < addresses.size(); ++i) {
      const uint64_t address = addresses[i];
      if (address < symbol.st_value || address - symbol.st_value >= symbol.st_size) continue;
      if (!best[i] || symbol.st_value > best[i]->st_value) best[i] = symbol;
    }
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (!best[i] || !found[i].empty() || best[i]->st_name >= names.sh_size) continue;
    const std::string text = read(names.sh_offset + best[i]->st_name, kLongestName);
    found[i] = readable(text.substr(0, text.find('\0')));
  }
}

}  // namespace

std::vector<std::string> functions_at(const ReadAt& read, const std::vector<uint64_t>& addresses) {
  std::vector<std::string> found(addresses.size());
  const auto header = part_at<Elf64_Ehdr>(read, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
      header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_shentsize != sizeof(Elf64_Shdr)) {
    return found;
  }
  const auto section = [&](uint64_t index) {
    return part_at<Elf64_Shdr>(read, header->e_shoff + index * sizeof(Elf64_Shdr));
  };
  // The full table first; a stripped file has only the second.
  for (const uint32_t type : {SHT_SYMTAB, SHT_DYNSYM}) {
    for (uint64_t index = 0; index < header->e_shnum; ++index) {
      const auto table = section(index);
      if (!table) return found;
      if (table->sh_type != type) continue;
      if (const auto names = section(table->sh_link)) {
        search(read, *table, *names, addresses, found);
      }
    }
  }
  return found;
}

std::vector<std::string> functions_at(const std::string& path,
                                      const std::vector<uint64_t>& addresses) {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  // Read and not mapped: a file that is truncated meanwhile would end the launcher by SIGBUS.
  const ReadAt read = [&file](uint64_t offset, uint64_t size) {
    std::string bytes(size, '\0');
    size_t have = 0;
    while (have < size) {
      const ssize_t got =
          pread(file.get(), bytes.data() + have, size - have, static_cast<off_t>(offset + have));
      if (got <= 0) break;
      have += static_cast<size_t>(got);
    }
    bytes.resize(have);
    return bytes;
  };
  return file ? functions_at(read, addresses) : std::vector<std::string>(addresses.size());
}

}  // namespace lockstep::launch

#include "launch/process/secret.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

namespace lockstep::launch {

void conceal_token() noexcept {
  constexpr std::string_view kName = "LOCKSTEP_TOKEN=";
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    char* const text = *entry;
    if (std::strncmp(text, kName.data(), kName.size()) != 0) continue;
    explicit_bzero(text + kName.size(), std::strlen(text + kName.size()));
  }
  unsetenv("LOCKSTEP_TOKEN");
}

}  // namespace lockstep::launch

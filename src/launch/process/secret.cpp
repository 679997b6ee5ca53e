#include "launch/process/secret.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace lockstep::launch {

void conceal(const char* name) noexcept {
  const size_t length = std::strlen(name);
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    char* const text = *entry;
    if (std::strncmp(text, name, length) != 0 || text[length] != '=') continue;
    char* const value = text + length + 1;
    explicit_bzero(value, std::strlen(value));
  }
  unsetenv(name);
}

}  // namespace lockstep::launch

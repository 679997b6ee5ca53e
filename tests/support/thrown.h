// What a call throws, for tests to look at.
#pragma once

#include <exception>
#include <string>

namespace lockstep::test {

// What `call` throws as an Error, or "nothing".
template <class Error = std::exception, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

}  // namespace lockstep::test

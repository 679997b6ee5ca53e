#include "core/security/munge.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>

#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::munge {
namespace {

// Of munge.h, whose numbers are those of the library's version 2.
constexpr int kCipherType = 0, kSocket = 8, kUidRestriction = 9;
constexpr int kAes128 = 4;

struct Library {
  using Context = void*;
  Context (*create)() = nullptr;
  void (*destroy)(Context) = nullptr;
  int (*set)(Context, int, ...) = nullptr;
  int (*encode)(char**, Context, const void*, int) = nullptr;
  int (*decode)(const char*, Context, void**, int*, uid_t*, gid_t*) = nullptr;
  const char* (*context_error)(Context) = nullptr;
  const char* (*error)(int) = nullptr;

  // Throws Error without it.
  static const Library& get();
};

const Library& Library::get() {
  static const Library library = [] {
    void* const handle = dlopen("libmunge.so.2", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw Error("libmunge.so.2 is not there");
    Library found;
    const auto look_up = [handle](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) throw Error(fmt::format("libmunge.so.2 has no {}", name));
    };
    look_up(found.create, "munge_ctx_create");
    look_up(found.destroy, "munge_ctx_destroy");
    look_up(found.set, "munge_ctx_set");
    look_up(found.encode, "munge_encode");
    look_up(found.decode, "munge_decode");
    look_up(found.context_error, "munge_ctx_strerror");
    look_up(found.error, "munge_strerror");
    return found;
  }();
  return library;
}

// Slurm's daemon, where it has one of its own: AuthInfo=socket=PATH,... of its configuration.
std::string socket_of_slurm() {
  constexpr std::string_view kKey = "AuthInfo=", kName = "socket=";
  for (const std::string& path :
       {env_text("SLURM_CONF").value_or(""), std::string("/etc/slurm/slurm.conf"),
        std::string("/run/slurm/conf/slurm.conf")}) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with(kKey)) continue;
      const size_t begin = line.find(kName, kKey.size());
      if (begin == std::string::npos) return "";
      const size_t value = begin + kName.size();
      return line.substr(value, line.find_first_of(", \t#", value) - value);
    }
  }
  return "";
}

class Context {
 public:
  Context() : context_(library_.create()) {
    if (context_ == nullptr) throw Error("munge: no memory");
    static const std::string socket = socket_of_slurm();
    if (!socket.empty()) library_.set(context_, kSocket, socket.c_str());
  }
  ~Context() { library_.destroy(context_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  std::string seal(std::string_view text) {
    check(library_.set(context_, kCipherType, kAes128));  // a site's default may be none
    check(library_.set(context_, kUidRestriction, geteuid()));
    char* credential = nullptr;
    const int error =
        library_.encode(&credential, context_, text.data(), static_cast<int>(text.size()));
    const std::unique_ptr<char, void (*)(void*)> owned(credential, std::free);
    check(error);
    return credential;
  }

  std::string open(const std::string& credential) {
    void* text = nullptr;
    int length = 0;
    uid_t user = 0;
    gid_t group = 0;
    const int error = library_.decode(credential.c_str(), context_, &text, &length, &user, &group);
    const std::unique_ptr<void, void (*)(void*)> owned(text, std::free);
    check(error);
    if (user != geteuid()) throw Error(fmt::format("munge: sealed by another user, {}", user));
    return {static_cast<const char*>(text), static_cast<size_t>(length)};
  }

 private:
  void check(int error) const {
    if (error == 0) return;
    const char* const detail = library_.context_error(context_);
    throw Error(fmt::format("munge: {}", detail != nullptr ? detail : library_.error(error)));
  }

  const Library& library_ = Library::get();
  const Library::Context context_;
};

}  // namespace

std::string seal(std::string_view text) { return Context().seal(text); }

std::string fault() {
  try {
    static_cast<void>(seal(""));
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string open(const std::string& credential) { return Context().open(credential); }

}  // namespace lockstep::munge

// OpenSSL for the whole life of the process.
#pragma once

#include <openssl/crypto.h>

namespace lockstep {

// Called before every first use of OpenSSL. By default exit() frees what OpenSSL shares between its
// objects, its locks among them. Rank 0 serves the store in a thread until later in exit(), and a
// program may end with other connections open: a thread that closes one meanwhile would wait on a
// lock that is gone, and exit() for the thread, without end. A handler that the program itself has
// had registered before stays; it runs after everything of ours that was made later has ended.
inline void keep_openssl() {
  static const int kept = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  static_cast<void>(kept);
}

}  // namespace lockstep

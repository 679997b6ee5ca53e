#include "core/security/tls.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <array>
#include <utility>

#include "core/security/openssl.h"

namespace lockstep {

struct Tls::State {
  Digest key;
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl{nullptr, SSL_free};
  BIO* in = nullptr;  // owned by ssl
  BIO* out = nullptr;
  std::string waiting;  // to be written when the handshake is over
  size_t written = 0;   // bytes, with the present key
};

namespace {

constexpr std::string_view kIdentity = "lockstep";
// RFC 8446, 5.5: 2^24.5 full records of AES-GCM at most, some 380 GiB.
constexpr size_t kMostWithOneKey = size_t{64} << 30;
constexpr std::array<unsigned char, 2> kAes128GcmSha256 = {0x13, 0x01};

[[noreturn]] void fail(const char* what) {
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_get_error(), text.data(), text.size());
  ERR_clear_error();
  throw TlsError(fmt::format("TLS: {} ({})", what, text.data()));
}

// The key as the session that TLS 1.3 resumes.
SSL_SESSION* session_of(SSL* ssl, const Digest& key) {
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kAes128GcmSha256.data());
  SSL_SESSION* session = SSL_SESSION_new();
  if (cipher == nullptr || session == nullptr ||
      SSL_SESSION_set1_master_key(session, key.data(), key.size()) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

const Digest& key_of(SSL* ssl) { return *static_cast<const Digest*>(SSL_get_app_data(ssl)); }

int offer(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* length,
          SSL_SESSION** session) {
  *id = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *length = kIdentity.size();
  *session = session_of(ssl, key_of(ssl));
  return *session != nullptr ? 1 : 0;
}

int find(SSL* ssl, const unsigned char* id, size_t length, SSL_SESSION** session) {
  const std::string_view name(reinterpret_cast<const char*>(id), length);
  *session = name == kIdentity ? session_of(ssl, key_of(ssl)) : nullptr;
  return 1;
}

using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;

// The same for every connection: making one takes longer than the handshake.
Context make_context(Tls::Role role) {
  const bool is_client = role == Tls::Role::Client;
  Context context(SSL_CTX_new(is_client ? TLS_client_method() : TLS_server_method()), SSL_CTX_free);
  if (!context || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context.get(), "TLS_AES_128_GCM_SHA256") != 1 ||
      SSL_CTX_set_num_tickets(context.get(), 0) != 1) {
    fail("no context");
  }
  if (is_client) {
    SSL_CTX_set_psk_use_session_callback(context.get(), offer);
    // A server without the key would have to show a certificate, which no peer accepts.
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  } else {
    SSL_CTX_set_psk_find_session_callback(context.get(), find);
  }
  return context;
}

}  // namespace

Tls::Tls(Role role, const Digest& key) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.key = key;
  keep_openssl();
  // Never freed: connections are accepted until the process has ended.
  static const Context &client = *new Context(make_context(Role::Client)),
                       &server = *new Context(make_context(Role::Server));
  state.ssl.reset(SSL_new((role == Role::Client ? client : server).get()));
  state.in = BIO_new(BIO_s_mem());
  state.out = BIO_new(BIO_s_mem());
  if (state.ssl == nullptr || state.in == nullptr || state.out == nullptr) fail("no memory");
  SSL* ssl = state.ssl.get();
  SSL_set_app_data(ssl, &state.key);
  SSL_set_bio(ssl, state.in, state.out);
  if (role == Role::Client) {
    SSL_set_connect_state(ssl);
    SSL_do_handshake(ssl);  // its first flight; the answer is not here yet
  } else {
    SSL_set_accept_state(ssl);
  }
}

Tls::Tls(Tls&&) noexcept = default;

Tls::~Tls() { ERR_clear_error(); }

void Tls::push(std::string_view bytes) {
  size_t taken = 0;
  if (bytes.empty()) return;
  if (BIO_write_ex(state_->in, bytes.data(), bytes.size(), &taken) != 1 || taken != bytes.size())
    fail("no memory");
}

size_t Tls::read(char* to, size_t room) {
  SSL* ssl = state_->ssl.get();
  ERR_clear_error();  // what other users of this thread have left would be taken for ours
  size_t done = 0;
  while (done < room) {
    size_t got = 0;
    if (const int ok = SSL_read_ex(ssl, to + done, room - done, &got); ok != 1) {
      const int error = SSL_get_error(ssl, ok);
      if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_ZERO_RETURN) break;
      fail("a broken stream");
    }
    done += got;
  }
  return done;
}

std::string Tls::feed(std::string_view bytes) {
  SSL* ssl = state_->ssl.get();
  push(bytes);
  if (SSL_in_init(ssl)) {
    const int done = SSL_do_handshake(ssl);
    if (done != 1) {
      if (SSL_get_error(ssl, done) == SSL_ERROR_WANT_READ) return "";
      fail("no handshake");
    }
    write(std::exchange(state_->waiting, {}));
  }
  std::string plain;
  std::array<char, 16384> buffer;
  while (const size_t got = read(buffer.data(), buffer.size())) plain.append(buffer.data(), got);
  return plain;
}

bool Tls::is_open() const { return SSL_is_init_finished(state_->ssl.get()) == 1; }

void Tls::write(std::string_view plain) {
  if (plain.empty()) return;
  SSL* ssl = state_->ssl.get();
  if (SSL_in_init(ssl)) {
    state_->waiting += plain;
    return;
  }
  size_t taken = 0;
  if (SSL_write_ex(ssl, plain.data(), plain.size(), &taken) != 1 || taken != plain.size())
    fail("cannot write");
  state_->written += plain.size();
  if (state_->written > kMostWithOneKey) renew_key();
}

void Tls::renew_key() {
  state_->written = 0;
  SSL* ssl = state_->ssl.get();
  if (SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1 || SSL_do_handshake(ssl) != 1) {
    fail("no new key");
  }
}

std::string Tls::take_output() {
  std::string bytes(static_cast<size_t>(BIO_ctrl_pending(state_->out)), '\0');
  size_t got = 0;
  if (!bytes.empty() && BIO_read_ex(state_->out, bytes.data(), bytes.size(), &got) != 1)
    fail("no output");
  bytes.resize(got);
  return bytes;
}

}  // namespace lockstep

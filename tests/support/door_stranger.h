// What a stranger of this host may send to a rank's door: any bytes, with any number of
// descriptors.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "core/files/fd.h"

namespace lockstep::test {

// `count` times a descriptor of /dev/null or whatever `fd` is; 250 at most. False when the door
// took nothing.
inline bool send_to_door(const std::string& address, std::string_view bytes, int fd, size_t count) {
  constexpr size_t kMost = 250;
  count = std::min(count, kMost);
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  const size_t length = std::min(address.size(), sizeof to.sun_path - 1);
  std::memcpy(to.sun_path + 1, address.data(), length);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMost * sizeof(int))> control{};
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_name = &to;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (count > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof fd);
    }
  }
  const Fd own(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return own && sendmsg(own.get(), &message, MSG_NOSIGNAL) >= 0;
}

}  // namespace lockstep::test

// Numbers formatted for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::train {

// Seconds since 1970, as logs have them.
double unix_now();
// "12,345".
std::string with_commas(int64_t number);
// "1 step", "12,345 steps".
std::string counted(int64_t number, std::string_view what);
// "12.3 ms", "2.05 s", "850 us"; from 1000 s on as long_time().
std::string short_time(double seconds);
// "3 h 20 min", "2 min 5 s", "12 s": of a run.
std::string long_time(double seconds);
// "512.3 MB", "1.5 GB", of 10^6 and 10^9 bytes.
std::string memory_text(double bytes);
// "12 %", "0.3 %".
std::string percent(double share);
// Four digits that count: "0.3121", "1.2e-05".
std::string figure(double value);
// The same with zeros at the end, "0.3120", so that a line that is written over keeps its places.
std::string steady_figure(double value);
// Four digits after the point: "0.9312"; "NaN" also for the NaN that has a sign.
std::string metric_text(double value);
// "rank 1", with the host's name where there are several: "rank 1 (host-b)".
std::string rank_name(size_t rank, const std::string& host);

// What an event of a kind is called. A "restart" is a "start": one by hand that resumes the run is
// of that kind, too.
std::string kind_text(const std::string& kind);

// Makes spaces of what is not a letter but a command, in UTF-8: control characters but line feeds,
// and marks that turn the direction of the text after them.
std::string plain_text(std::string_view text);
// At most about this many bytes, with "…" in place of the rest.
std::string shortened(std::string_view text, size_t most);

// For HTML, as text and within attributes; plain_text() of it.
std::string escaped(std::string_view text);

}  // namespace lockstep::train

#include "checkpoint/format/torch_save/pickle.h"

#include <fmt/format.h>

#include <bit>
#include <unordered_map>

#include "checkpoint/format/json.h"
#include "checkpoint/format/torch_save/pickle_calls.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

// What Python's pickle has beside the opcodes below: for messages only.
constexpr std::pair<uint8_t, const char*> kOtherOpcodes[] = {{'0', "POP"},
                                                             {'1', "POP_MARK"},
                                                             {'2', "DUP"},
                                                             {'F', "FLOAT"},
                                                             {'I', "INT"},
                                                             {'L', "LONG"},
                                                             {'P', "PERSID"},
                                                             {'S', "STRING"},
                                                             {'T', "BINSTRING"},
                                                             {'U', "SHORT_BINSTRING"},
                                                             {'V', "UNICODE"},
                                                             {'B', "BINBYTES"},
                                                             {'C', "SHORT_BINBYTES"},
                                                             {'g', "GET"},
                                                             {'i', "INST"},
                                                             {'o', "OBJ"},
                                                             {'p', "PUT"},
                                                             {0x82, "EXT1"},
                                                             {0x83, "EXT2"},
                                                             {0x84, "EXT4"},
                                                             {0x8e, "BINBYTES8"},
                                                             {0x8f, "EMPTY_SET"},
                                                             {0x90, "ADDITEMS"},
                                                             {0x91, "FROZENSET"},
                                                             {0x92, "NEWOBJ_EX"},
                                                             {0x96, "BYTEARRAY8"},
                                                             {0x97, "NEXT_BUFFER"},
                                                             {0x98, "READONLY_BUFFER"}};

constexpr int kHighestProtocol = 5;
constexpr size_t kMostLineBytes = 1000;
constexpr size_t kFreeCopies = 100'000;

}  // namespace

// The machine that a pickle is a program for. docs.python.org/3/library/pickletools.html
class PickleReader {
 public:
  PickleReader(std::string_view bytes, std::string_view where, Pickle& pickle)
      : bytes_(bytes), where_(where), values_(pickle.values_) {
    while (!step()) {
    }
    if (stack_.size() != 1 || !marks_.empty()) complain("leaves more than one value");
    pickle.root_ = stack_[0];
  }

 private:
  [[noreturn]] void complain(const std::string& text) const {
    throw CheckpointError(fmt::format("{}: {}", where_, text));
  }

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - at_) complain(fmt::format("is cut short: it ends at byte {}", at_));
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  uint64_t number(int count) {
    uint64_t value = 0;
    const auto bytes = take(count);
    for (int i = count - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return value;
  }
  std::string line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos || end - at_ > kMostLineBytes) {
      complain("has a name without an end");
    }
    std::string text(take(end - at_));
    take(1);
    return text;
  }

  PickledValue& make(PickledValue value) {
    values_.push_back(std::move(value));
    return values_.back();
  }
  void push(PickledValue value) { stack_.push_back(&make(std::move(value))); }
  void push(PickledValue::Kind kind, int64_t integer) { push({.kind = kind, .integer = integer}); }
  void push_text(std::string_view text) {
    push({.kind = PickledValue::Text, .text = std::string(text)});
  }

  // What lies above the last mark stays.
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickledValue* pop() {
    if (stack_.size() <= floor())
      complain(fmt::format("takes a value that is not there at byte {}", at_));
    PickledValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickledValue& top(PickledValue::Kind kind) {
    if (stack_.size() <= floor() || stack_.back()->kind != kind) {
      complain(fmt::format("puts a value into what is not a list or dict at byte {}", at_));
    }
    return *stack_.back();
  }
  std::vector<const PickledValue*> pop_to_mark() {
    if (marks_.empty()) complain(fmt::format("takes a mark that is not there at byte {}", at_));
    std::vector<const PickledValue*> items(stack_.begin() + marks_.back(), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  std::vector<const PickledValue*> pop(size_t count) {
    std::vector<const PickledValue*> items(count);
    while (count-- > 0) items[count] = pop();
    return items;
  }

  void name(const std::string& module, const std::string& what) {
    const std::string full = module + "." + what;
    if (!is_known_name(full)) {
      complain(fmt::format(
          "{} is not read: Python would import it, and could be made to call it. What is "
          "read are tensors, numbers, texts, lists and dicts: save state dicts, as "
          "torch.save(net.state_dict(), FILE)",
          in_quotes(full)));
    }
    push({.kind = PickledValue::Name, .text = full});
  }

  void reduce() {
    const PickledValue* arguments = pop();
    const PickledValue* function = pop();
    if (function->kind != PickledValue::Name || arguments->kind != PickledValue::List) {
      complain(fmt::format("calls what is not a function at byte {}", at_));
    }
    PickledValue value =
        call_of(function->text, arguments->items, [this](const auto& text) { complain(text); });
    count_copies(value.items.size());
    push(std::move(value));
  }

  // TorchScript's modules, and nothing else, are made by their class.
  void new_object() {
    pop();  // no arguments
    const PickledValue* type = pop();
    if (type->kind != PickledValue::Name || !type->text.starts_with("__torch__.")) {
      complain(fmt::format("an object of {} is not read", in_quotes(type->text)));
    }
    push({.kind = PickledValue::Dict, .is_object = true});
  }

  void build() {
    const PickledValue* state = pop();
    PickledValue& value = top(PickledValue::Dict);
    // The attributes of an OrderedDict, such as a state dict's _metadata, hold nothing of its
    // items.
    if (!value.is_object) return;
    if (state->kind != PickledValue::Dict || state == &value)
      complain("a module's attributes are not a dict");
    count_copies(state->items.size());
    value.items.insert(value.items.end(), state->items.begin(), state->items.end());
  }

  // A short pickle could copy one long list again and again.
  void count_copies(size_t items) {
    copies_ += items;
    if (copies_ > kFreeCopies + bytes_.size()) complain("copies its parts too often");
  }

  void set_items(PickledValue& dict, const std::vector<const PickledValue*>& items) {
    if (items.size() % 2 != 0) complain(fmt::format("has a key without a value at byte {}", at_));
    dict.items.insert(dict.items.end(), items.begin(), items.end());
  }

  void long_number(uint64_t count) {
    if (count > 8) {
      complain(fmt::format("a whole number of {} bytes is not read: 8 are the most", count));
    }
    if (count == 0) return push(PickledValue::Int, 0);
    const uint64_t value = number(static_cast<int>(count));
    const int unused = static_cast<int>(64 - 8 * count);
    push(PickledValue::Int, static_cast<int64_t>(value << unused) >> unused);
  }

  void remember(uint64_t index) {
    if (stack_.size() <= floor()) complain("remembers a value that is not there");
    memo_[index] = stack_.back();
  }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end())
      complain(fmt::format("asks for value {}, which is not remembered", index));
    stack_.push_back(found->second);
  }

  bool step();                     // true at the end
  bool container(uint8_t opcode);  // false when it is none of these
  bool scalar(uint8_t opcode);

  std::string_view bytes_, where_;
  std::deque<PickledValue>& values_;
  size_t at_ = 0, copies_ = 0;
  std::vector<PickledValue*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickledValue*> memo_;
};

bool PickleReader::scalar(uint8_t opcode) {
  switch (opcode) {
    case 'N':
      push(PickledValue::None, 0);
      return true;
    case 0x88:  // NEWTRUE
    case 0x89:  // NEWFALSE
      push(PickledValue::Bool, opcode == 0x88 ? 1 : 0);
      return true;
    case 'J':  // BININT
      push(PickledValue::Int, static_cast<int32_t>(number(4)));
      return true;
    case 'K':  // BININT1
      push(PickledValue::Int, static_cast<int64_t>(number(1)));
      return true;
    case 'M':  // BININT2
      push(PickledValue::Int, static_cast<int64_t>(number(2)));
      return true;
    case 0x8a:  // LONG1
      long_number(number(1));
      return true;
    case 0x8b:  // LONG4
      long_number(number(4));
      return true;
    case 'G': {  // BINFLOAT: big-endian
      push({.kind = PickledValue::Float,
            .real = std::bit_cast<double>(__builtin_bswap64(number(8)))});
      return true;
    }
    case 'X':  // BINUNICODE
      push_text(take(number(4)));
      return true;
    case 0x8c:  // SHORT_BINUNICODE
      push_text(take(number(1)));
      return true;
    case 0x8d:  // BINUNICODE8
      push_text(take(number(8)));
      return true;
    default:
      return false;
  }
}

bool PickleReader::container(uint8_t opcode) {
  switch (opcode) {
    case '(':  // MARK
      marks_.push_back(stack_.size());
      return true;
    case ')':  // EMPTY_TUPLE
    case ']':  // EMPTY_LIST
      push({.kind = PickledValue::List});
      return true;
    case '}':  // EMPTY_DICT
      push({.kind = PickledValue::Dict});
      return true;
    case 0x85:  // TUPLE1, 2, 3
    case 0x86:
    case 0x87:
      push({.kind = PickledValue::List, .items = pop(opcode - 0x84)});
      return true;
    case 't':  // TUPLE
    case 'l':  // LIST
      push({.kind = PickledValue::List, .items = pop_to_mark()});
      return true;
    case 'd': {  // DICT
      PickledValue dict{.kind = PickledValue::Dict};
      set_items(dict, pop_to_mark());
      push(std::move(dict));
      return true;
    }
    case 'a': {  // APPEND
      const PickledValue* item = pop();
      top(PickledValue::List).items.push_back(item);
      return true;
    }
    case 'e': {  // APPENDS
      const auto items = pop_to_mark();
      auto& list = top(PickledValue::List).items;
      list.insert(list.end(), items.begin(), items.end());
      return true;
    }
    case 's': {  // SETITEM
      const auto items = pop(2);
      set_items(top(PickledValue::Dict), items);
      return true;
    }
    case 'u': {  // SETITEMS
      const auto items = pop_to_mark();
      set_items(top(PickledValue::Dict), items);
      return true;
    }
    default:
      return false;
  }
}

bool PickleReader::step() {
  const auto opcode = static_cast<uint8_t>(take(1)[0]);
  if (scalar(opcode) || container(opcode)) return false;
  switch (opcode) {
    case 0x80:  // PROTO
      if (const uint64_t protocol = number(1); protocol > kHighestProtocol) {
        complain(fmt::format("is a pickle of protocol {}, {} is the highest that is read", protocol,
                             kHighestProtocol));
      }
      return false;
    case 0x95:  // FRAME: how many bytes may be read at once
      take(8);
      return false;
    case 'q':  // BINPUT
      remember(number(1));
      return false;
    case 'r':  // LONG_BINPUT
      remember(number(4));
      return false;
    case 0x94:  // MEMOIZE
      remember(memo_.size());
      return false;
    case 'h':  // BINGET
      recall(number(1));
      return false;
    case 'j':  // LONG_BINGET
      recall(number(4));
      return false;
    case 'c': {  // GLOBAL
      const std::string module = line();
      name(module, line());
      return false;
    }
    case 0x93: {  // STACK_GLOBAL
      const auto names = pop(2);
      name(names[0]->text, names[1]->text);
      return false;
    }
    case 'R':  // REDUCE
      reduce();
      return false;
    case 0x81:  // NEWOBJ
      new_object();
      return false;
    case 'b':  // BUILD
      build();
      return false;
    case 'Q':  // BINPERSID
      push(storage_of(*pop(), [this](const auto& text) { complain(text); }));
      return false;
    case '.':  // STOP
      return true;
    default:
      break;
  }
  for (const auto& [other, text] : kOtherOpcodes) {
    if (other == opcode) {
      complain(fmt::format(
          "opcode {} at byte {} is not read: what is read are tensors, numbers, texts, lists "
          "and dicts, as torch.save writes them",
          text, at_ - 1));
    }
  }
  complain(fmt::format("is not a pickle: byte {} is {:#04x}, not an opcode", at_ - 1, opcode));
}

Pickle::Pickle(std::string_view bytes, std::string_view where) {
  PickleReader(bytes, where, *this);
}

}  // namespace lockstep::checkpoint

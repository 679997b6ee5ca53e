#include "lockstep/checkpoint/interchange.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>

#include "checkpoint/model.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/safetensors.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::load_module;
using checkpoint::LoadOptions;
using checkpoint::read_tensors;
using checkpoint::save_safetensors;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::string refused(torch::nn::Module& module, const std::string& path,
                    const LoadOptions& options = {}) {
  return message_of<CheckpointError>([&] { load_module(module, path, options); });
}

// That a file gives the module's bits to one that has others.
void expect_read(const Everything& net, const std::string& path, const LoadOptions& options = {}) {
  Everything other;
  other.scramble();
  const auto loaded = load_module(other, path, options);
  EXPECT_TRUE(same(net, other)) << path;
  EXPECT_TRUE(other.tied.is_same(other.first->weight));
  EXPECT_THAT(loaded.missing, ElementsAre());
  EXPECT_THAT(loaded.unexpected, ElementsAre());
}

TEST(Interchange, SafetensorsAsAFileAndAsShards) {
  isolated([] {
    const Folder folder;
    const Everything net;
    save_safetensors(net, folder / "net.safetensors");
    expect_read(net, folder / "net.safetensors");
    save_safetensors(net, folder / "hf", {.prefix = "model.", .max_shard_bytes = 1000});
    EXPECT_TRUE(std::filesystem::exists(folder / "hf/model.safetensors.index.json"));
    expect_read(net, folder / "hf", {.prefix = "model."});
    expect_read(net, folder / "hf/model.safetensors.index.json", {.prefix = "model."});
    save_safetensors(net, folder / "hf");
    expect_read(net, folder / "hf");
    EXPECT_EQ(read_tensors(folder / "hf").size(), 12u);
    EXPECT_TRUE(at::equal(read_tensors(folder / "hf").at("turned"), net.turned));
  });
}

// As is the value of the entry "format" that each file has.
TEST(Interchange, AParameterMayBeCalledPt) {
  isolated([] {
    const Folder folder;
    torch::nn::Module net, other;
    net.register_parameter("pt", at::full({2}, 3.0));
    at::Tensor& read = other.register_parameter("pt", at::zeros({2}));
    save_safetensors(net, folder / "net.safetensors");
    load_module(other, folder / "net.safetensors");
    EXPECT_TRUE(at::equal(read, at::full({2}, 3.0)));
    EXPECT_EQ(read_tensors(folder / "net.safetensors").size(), 1u);
  });
}

TEST(Interchange, WhatDoesNotFitIsListedAndNothingChanges) {
  isolated([] {
    const Folder folder;
    const Everything net;
    save_safetensors(net, folder / "net.safetensors");
    Everything wider(6);
    const auto before = wider.large.clone();
    const at::NoGradGuard no_grad;
    wider.half.set_data(wider.half.to(at::kFloat));
    wider.register_buffer("more", at::zeros({2}));
    wider.large.add_(1);
    const std::string told = refused(wider, folder / "net.safetensors");
    EXPECT_THAT(told, AllOf(HasSubstr("net.safetensors does not fit the module:"),
                            HasSubstr("\n    first.bias differs: F32 [5] there, F32 [6] here"),
                            HasSubstr("half differs: BF16 [7] there, F32 [7] here"),
                            HasSubstr("more is missing: F32 [2] here"), Not(HasSubstr("large"))));
    EXPECT_TRUE(at::equal(wider.large, before + 1)) << "changed";
    EXPECT_THAT(refused(*wider.second, folder / "net.safetensors", {.prefix = "first."}),
                HasSubstr("weight differs: F32 [5, 3] there, F32 [3, 6] here"));
    EXPECT_THAT(refused(*wider.second, folder / "net.safetensors", {.prefix = "third."}),
                HasSubstr("no name begins with 'third.'; there are complex, count, first.bias"));

    torch::nn::Linear few(3, 5);
    EXPECT_THAT(refused(*few, folder / "net.safetensors"),
                AllOf(HasSubstr("weight is missing: F32 [5, 3] here"),
                      HasSubstr("large is unexpected: the module has nothing of that name")));
    const auto loaded = load_module(few, folder / "net.safetensors",
                                    {.allow_missing = {"w*", "bias"}, .allow_unexpected = {"*"}});
    EXPECT_THAT(loaded.missing, ElementsAre("weight", "bias"));
    EXPECT_EQ(loaded.unexpected.size(), 12u);
    load_module(few, folder / "net.safetensors", {.prefix = "first."});
    EXPECT_TRUE(at::equal(few->weight, net.first->weight));
  });
}

TEST(Interchange, DtypesAreConvertedOnlyWhenAsked) {
  isolated([] {
    const Folder folder;
    torch::nn::Linear narrow(3, 2), wide(3, 2);
    narrow->to(torch::kBFloat16);
    save_safetensors(narrow, folder / "x.safetensors");
    EXPECT_THAT(refused(*wide, folder / "x.safetensors"),
                HasSubstr("weight differs: BF16 [2, 3] there, F32 [2, 3] here"));
    load_module(wide, folder / "x.safetensors", {.allow_conversion = {"*"}});
    EXPECT_TRUE(at::equal(wide->weight, narrow->weight.to(torch::kFloat)));
  });
}

// What is copied to the meta device is gone, and libtorch does not say so.
TEST(Interchange, AModuleOnTheMetaDeviceIsNotReadInto) {
  isolated([] {
    const Folder folder;
    torch::nn::Module net, meta;
    net.register_parameter("weight", torch::ones({2, 3}));
    meta.register_parameter("weight", torch::empty({2, 3}, torch::kMeta));
    save_safetensors(net, folder / "x.safetensors");
    const std::string why = "weight cannot be written to here: it is on the meta device";
    EXPECT_THAT(refused(meta, folder / "x.safetensors"), HasSubstr(why));
    {
      Checkpointer checkpoints(Group(), folder / "saved");
      checkpoints.track("net", net);
      checkpoints.save(1);
    }
    Checkpointer checkpoints(Group(), folder / "saved");
    checkpoints.track("net", meta);
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                HasSubstr("net/" + why));
  });
}

// Pairs are those with a last dimension of 2 more; all other real numbers are the real parts.
TEST(Interchange, RealNumbersAndPairsBecomeComplexOnes) {
  isolated([] {
    const Folder folder;
    const auto net_of = [](const at::Tensor& tensor) {
      auto net = std::make_shared<torch::nn::Module>();
      net->register_buffer("a", torch::zeros({2}));
      net->register_buffer("z", tensor);
      return net;
    };
    const auto loaded = [&](const at::Tensor& stored, at::IntArrayRef sizes) {
      const std::string path = folder / "x.safetensors";
      auto saved = net_of(stored), net = net_of(torch::zeros(sizes, torch::kComplexFloat));
      saved->named_buffers()["a"].fill_(3);
      save_safetensors(*saved, path);
      EXPECT_THAT(refused(*net, path), HasSubstr("z differs: "));
      load_module(net, path, {.allow_conversion = {"z"}});
      return net->named_buffers()["z"].clone();
    };
    const at::Tensor square = torch::tensor({{1.0F, 2.0F}, {3.0F, 4.0F}});
    const at::Tensor real = at::complex(square, torch::zeros({2, 2}));
    for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble,
                             torch::kLong, torch::kByte}) {
      EXPECT_TRUE(at::equal(loaded(square.to(dtype), {2, 2}), real)) << dtype;
    }
    const at::Tensor pairs = at::complex(torch::tensor({1.0F, 3.0F}), torch::tensor({2.0F, 4.0F}));
    EXPECT_TRUE(at::equal(loaded(square.to(torch::kDouble), {2}), pairs));
    // Of the dtype that belongs to it without being asked.
    auto saved = net_of(square), net = net_of(torch::zeros({2}, torch::kComplexFloat));
    save_safetensors(*saved, folder / "pairs.safetensors");
    load_module(net, folder / "pairs.safetensors");
    EXPECT_TRUE(at::equal(net->named_buffers()["z"], pairs));
  });
}

TEST(Interchange, TiedParametersThatDifferThereAreAnError) {
  isolated([] {
    const Folder folder;
    Everything net;
    const auto write_pair = [&](float value) {
      const std::vector<float> a(15, 1), b(15, value);
      const auto view = [](const auto& values) {
        return std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * 4);
      };
      const auto dtype = *checkpoint::Dtype::named("F32");
      checkpoint::write_safetensors(folder / "x", {{"first.weight", dtype, {5, 3}, view(a)},
                                                   {"tied", dtype, {5, 3}, view(b)}});
    };
    const LoadOptions rest{.allow_missing = {"*"}};
    write_pair(1);
    load_module(net, folder / "x", rest);
    EXPECT_EQ(net.tied.sum().item<float>(), 15);
    write_pair(2);
    EXPECT_THAT(refused(net, folder / "x", rest),
                HasSubstr("are one parameter here, and have different values there"));
  });
}

// C++'s own archives.
TEST(Interchange, ArchivesOfTorchSaveInCpp) {
  isolated([] {
    const Folder folder;
    const Everything net;
    torch::serialize::OutputArchive archive;
    net.save(archive);
    archive.save_to(folder / "net.pt");
    expect_read(net, folder / "net.pt");
    torch::nn::Linear linear(3, 2), other(3, 2);
    torch::save(linear, folder / "linear.pt");
    load_module(other, folder / "linear.pt");
    EXPECT_TRUE(same(*linear, *other));
  });
}

TEST(Interchange, TheModelOfACheckpoint) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.save(3);
    expect_read(net, folder.path(), {.prefix = "net/"});
  });
}

// Python reads what we write, and we read what Python makes of it, bit for bit.
TEST(Interchange, PythonAndBack) {
  isolated([] {
    const Folder folder;
    const Everything net;
    save_safetensors(net, folder / "net.safetensors");
    save_safetensors(net, folder / "hf", {.max_shard_bytes = 1000});
    std::ofstream(folder / "x.py") << R"(
import json, sys, torch
from safetensors import safe_open
from safetensors.torch import load_file
d = sys.argv[1]
t = load_file(d + '/net.safetensors')
assert t['complex'].dtype == torch.complex64 and t['half'].dtype == torch.bfloat16, t
assert t['none'].shape == (0, 4) and t['count'].item() == 7
tied = safe_open(d + '/net.safetensors', 'pt').metadata()
index = json.load(open(d + '/hf/model.safetensors.index.json'))['weight_map']
sharded = {n: v for f in set(index.values()) for n, v in load_file(d + '/hf/' + f).items()}
assert set(sharded) == set(index) == set(t)
assert all(torch.equal(sharded[n], t[n]) for n in t)
t = {n: v.clone() for n, v in t.items()}  # they are views of one storage, which torch.save refuses
t.update({n: t[o] for n, o in tied.items() if o in t})
torch.save({'model': {'module.' + n: v for n, v in t.items()}, 'epoch': 7}, d + '/net.pt')
)";
    ASSERT_EQ(
        std::system(fmt::format("{0} {1}/x.py {1}", LOCKSTEP_PEERS_PYTHON, folder.path()).c_str()),
        0);
    expect_read(net, folder / "net.pt", {.prefix = "model.module."});
    Everything other;
    EXPECT_EQ(load_module(other, folder / "net.pt", {.prefix = "model.module."}).values.at("epoch"),
              checkpoint::Value(int64_t{7}));
  });
}

}  // namespace
}  // namespace lockstep::test

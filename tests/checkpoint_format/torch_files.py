"""Files of torch.save for torch_file_test.cpp, and the same tensors as safetensors.

python3 torch_files.py FOLDER          writes them
python3 torch_files.py FOLDER check    ours.safetensors has the same bits
"""
import os
import pathlib
import sys
import zipfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

folder = pathlib.Path(sys.argv[1])
DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
          "float32", "float64", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn"]


def flat(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{name}.{key}" if name else str(key))


def plain(tensor):
    tensor = tensor.contiguous()
    return torch.view_as_real(tensor).clone() if tensor.dtype == torch.complex128 else tensor.clone()


def rewritten(source, target):
    """As torch 1.6 laid it out: an archive called archive, without the records that came later, and no zip64."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for record in old.namelist():
            rest = record.split("/", 1)[1]
            if rest == "data.pkl" or rest == "version" or rest.startswith("data/"):
                new.writestr(f"archive/{rest}", old.read(record))


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {folder}/executed",)


if sys.argv[2:] == ["check"]:
    with (safe_open(folder / "expected.safetensors", "pt") as expected,
          safe_open(folder / "ours.safetensors", "pt") as ours):
        tied = ours.metadata()
        expected_names, our_names = set(expected.keys()), set(ours.keys())
        assert expected_names == our_names | (set(tied) - {"format"}), (expected_names ^ our_names, tied)
        for name in expected.keys():
            a, b = expected.get_tensor(name), ours.get_tensor(tied.get(name, name))
            assert a.dtype == b.dtype and a.shape == b.shape, name
            assert a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8)), name
    sys.exit()

torch.manual_seed(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.fc(x))


net = Net()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
net(torch.randn(5, 4)).sum().backward()
adam.step()
# Has a collections.Counter.
schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [3, 6])
base = torch.arange(24.0)
marked = torch.nn.Parameter(torch.ones(2))
marked.note = "attributes of tensors are left out"
dtypes = {name: torch.randint(0, 2, (6, 16), dtype=torch.uint8).view(getattr(torch, name)) for name in DTYPES}
everything = {
    "net": net.state_dict(), "optimizer": adam.state_dict(), "schedule": schedule.state_dict(),
    "device": torch.device("cuda", 1), "epoch": 7, "name": "x", "none": None, "dtypes": dtypes,
    "views": [base.view(4, 6).t(), base[3:20:2], base.view(2, 3, 4).permute(2, 0, 1), base[5], base[:0],
              base.expand(2, 24)],
    "parameters": (net.fc.weight, marked), "tied": net.fc.weight.detach(), "size": torch.Size([1, 2]),
    "dtype": torch.float16,
}
torch.save(everything, folder / "new.pt")
torch.save(everything, folder / "protocol4.pt", pickle_protocol=4)
torch.save(everything, folder / "protocol5.pt", pickle_protocol=5)
torch.save(everything, folder / "legacy.pt", _use_new_zipfile_serialization=False)
rewritten(folder / "new.pt", folder / "old.pt")
torch.serialization.set_crc32_options(False)
torch.save(everything, folder / "nocrc.pt")
torch.serialization.set_crc32_options(True)
torch.save(torch.nn.Linear(2, 2), folder / "module.pt")
torch.save({"a": Evil()}, folder / "evil.pt")
torch.jit.script(net).save(folder / "script.pt")
save_file({name: plain(tensor) for name, tensor in flat(everything)}, folder / "expected.safetensors")

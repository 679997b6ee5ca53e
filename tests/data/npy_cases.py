"""Arrays for npy_test.cpp, written by numpy: npy_cases.py FOLDER."""
import sys

import numpy as np
from numpy.lib import format as npy

folder = sys.argv[1]
base = np.arange(2 * 3 * 4).reshape(2, 3, 4)
for dtype in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
              "float64", "complex64", "complex128"):
    array = (base % 2 == 1) if dtype == "bool" else (base - (0 if dtype[0] == "u" else 5)).astype(dtype)
    if dtype == "uint16":
        array[0, 0, 0] = 65535
    if dtype == "uint32":
        array[0, 0, 0] = 4294967295
    if dtype.startswith("complex"):
        array = array * (1 + 2j)
    for order in "CF":
        for byte_order in "<>":
            stored = np.asarray(array, order=order).astype(np.dtype(dtype).newbyteorder(byte_order), order=order)
            for version in ((1, 0), (2, 0), (3, 0)):
                name = f"{dtype}-{order}{'l' if byte_order == '<' else 'b'}{version[0]}.npy"
                with open(f"{folder}/{name}", "wb") as file:
                    npy.write_array(file, stored, version=version)
np.save(f"{folder}/scalar.npy", np.float32(7))
np.save(f"{folder}/empty.npy", np.zeros((0, 3), np.float32))
np.save(f"{folder}/objects.npy", np.array([{}], dtype=object))
np.save(f"{folder}/texts.npy", np.array(["a", "b"]))
np.save(f"{folder}/fields.npy", np.zeros(2, dtype=[("x", "f4"), ("y", "i4")]))
np.save(f"{folder}/long_double.npy", np.zeros(2, dtype=np.longdouble))
np.save(f"{folder}/large.npy", np.array([2**63], dtype=np.uint64))
np.save(f"{folder}/labels.npy", np.array([1, 0], dtype=np.int16))
np.savez(f"{folder}/both.npz", x=base)

"""Prints how two runs of the Fashion-MNIST program compare: python3 compare.py ONE.json MANY.json"""
import json
import sys

one, many = (json.load(open(path)) for path in sys.argv[1:])
print(f"{many['world']} ranks against {one['world']}: {many['samples_per_s']:,.0f} against {one['samples_per_s']:,.0f} "
      f"samples/s, speed-up {many['samples_per_s'] / one['samples_per_s']:.2f}x; test accuracy "
      f"{100 * many['accuracy']:.2f} % against {100 * one['accuracy']:.2f} %")

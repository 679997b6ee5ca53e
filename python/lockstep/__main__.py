"""The program `lockstep`, where the package was installed by pip."""
import os
import pathlib
import sys


def main():
    program = pathlib.Path(__file__).parent / "bin" / "lockstep"
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()

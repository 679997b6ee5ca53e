#!/bin/sh
# mpirun starts the ranks itself; the program finds its place in mpirun's variables. Open MPI's mpirun over two hosts:
#   HOSTS=node1:4,node2:4 mpirun.sh PROGRAM ARGS
# --bind-to none: a rank's threads may use more than one core.
exec "${MPIRUN:-mpirun}" --bind-to none ${HOSTS:+--host "$HOSTS"} "$@"

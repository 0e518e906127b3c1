#!/bin/sh
# Stands in for the launcher whose name it has: runs a command as two tasks of a job. torch is left out, for the time.
name=${0##*/}
while [ "${1#-}" != "$1" ]; do
    case $1 in -w | -R | --map-by) shift ;; --label) name=label ;; esac
    shift
done
code=0
tasks=
for rank in 0 1; do
    case $name in
        srun) SLURM_PROCID=$rank SLURM_NTASKS=2 "$@" --no-torch & ;;
        mpirun) OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 "$@" --no-torch & ;;
        *) "$@" --no-torch | sed "s/^/$rank: /" && continue ;; # one by one: two seds would mix parts of lines
    esac
    tasks="$tasks $!"
done
for task in $tasks; do
    wait "$task" || code=$?
done
exit "$code"

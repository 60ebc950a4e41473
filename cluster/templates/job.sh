#!/bin/bash
@directives@
#
# Written by `python -m cluster.submit`. The same file can be queued again with `sbatch`: the run goes on where it was.
set -uo pipefail
cd @work_folder@ || exit 1
export PATH=@bin_folder@:"$PATH"
folder=@cluster_folder@
nodes="$SLURM_JOB_NUM_NODES"
export HOST_FILE="$folder/hosts-$SLURM_JOB_ID"
export VERDICT="$folder/verdict-$SLURM_JOB_ID"
export MASTER_PORT=$((@first_port@ + SLURM_JOB_ID % @ports@))

# Slurm signals this shell alone: before the time limit (--signal=B:USR1), at preemption, or by `scancel --batch`. bash runs a
# trap only between commands, so the step runs in the background; srun passes USR1 on to every node.
stopping= step=
stop() {
    stopping=yes
    echo "[job $SLURM_JOB_ID] asked to stop at $(date -Is)"
    if [ -n "$step" ]; then
        # srun dies of a signal that comes before it is ready
        [ $((SECONDS - began)) -ge 3 ] || sleep 3
        kill -USR1 "$step" 2>/dev/null
    fi
}
trap stop USR1 TERM

# the nodes may be others than at the last start, so the host file is made anew from what each one says it was allotted
rm -f "$VERDICT"
srun --nodes="$nodes" --ntasks-per-node=1 --whole --kill-on-bad-exit=1 \
    bash -c 'echo "$SLURM_NODEID $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:-}"' </dev/null |
    @python@ -m cluster.hostfile --nodes "$nodes" @slots@ >"$HOST_FILE.new" || exit 2
mv "$HOST_FILE.new" "$HOST_FILE"
read -r MASTER_ADDR _ <"$HOST_FILE"
export MASTER_ADDR
echo "[job $SLURM_JOB_ID] start ${SLURM_RESTART_COUNT:-0} at $(date -Is) on $SLURM_JOB_NODELIST: $(paste -sd, "$HOST_FILE")"

code=0
if [ -z "$stopping" ]; then
    began=$SECONDS
    srun --nodes="$nodes" --ntasks-per-node=1 --whole --cpu-bind=none --kill-on-bad-exit=1 \
        bash -c 'exec @python@ -m cluster.node --stopped-code @stopped_code@ --verdict "$VERDICT" \
            --launcher @launcher@ --no_ssh --hostfile "$HOST_FILE" --node_rank "$SLURM_NODEID" \
            --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" -- "$@"' node \
        @command@ </dev/null &
    step=$!
    # a trap interrupts `wait`: wait again until the step is gone
    while :; do
        wait "$step"
        code=$?
        kill -0 "$step" 2>/dev/null || break
    done
else
    echo @stopped_code@ >"$VERDICT"
fi

# what the ranks said is more exact than srun's code, which is that of the nodes it killed after the first failure
verdict=$(cat "$VERDICT" 2>/dev/null)
rm -f "$VERDICT"
if [ "$code" -eq 0 ] && [ "$verdict" = @stopped_code@ ]; then
    trap '' USR1 TERM
    echo "[job $SLURM_JOB_ID] stopped and saved; back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    code=@stopped_code@
elif [ "$code" -ne 0 ] && [ "${verdict:-@stopped_code@}" != @stopped_code@ ]; then
    code=$verdict
fi
echo "[job $SLURM_JOB_ID] ended with exit code $code at $(date -Is)"
exit "$code"

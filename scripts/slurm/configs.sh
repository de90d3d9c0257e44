# Parallel shapes of both sides, in one place. Sourced by refit.sbatch; run it to list them.
#   trainers            ranks per node x nodes, and what Megatron-Core makes of them (dp is what is left)
#   engines             replicas of one vLLM each; "tp4dp4" of a table is 4 replicas of tp 4 here
# Model folders: $XFER_MODELS/NAME, a Hugging Face checkpoint; "toy" models are written by the job.

configs() { echo smoke smoke-apart smoke-over-nodes 4b-dp8-to-dp8 4b-dp8-to-tp8 4b-pp2dp4-to-tp4dp2 4b-pp4dp2-to-tp4dp2 4b-tp2pp2dp2-to-tp4dp2 4b-tp2dp4-to-tp4dp2 \
  30b-ep4tp2dp2-to-tp4dp4 30b-ep4tp2pp2-to-tp4dp4 30b-ep8pp2-to-tp2dp8 30b-ep8pp2-to-tp8dp2 nano_v3-ep8tp2-to-tp4dp4 \
  super_v3-ep8tp8pp2dp2-to-tp8dp2 235b-tp4pp8ep16-to-tp8dp16 deepseek_v3-pp16ep16-to-tp32dp8; }

uneven() { loop+=(--provider num_layers_in_first_pipeline_stage="$1" --provider num_layers_in_last_pipeline_stage="$2"); }

# Sets: model kind dtype  tp pp ep etp ranks ranks_per_node  engine_tp replicas engine_ranks_per_node  steps loop save
#   loop                what train.py is given besides. For real models a usual rate, and a gate that is printed and not judged: in bf16
#                       it is rounding, of a size that depends on the model
#   save                where the job keeps checkpoints, none if empty. Those of real models are large, and made of the whole model in
#                       rank 0's host memory: whoever wants them gives --save FOLDER --save-every N
config() {
  loop=(--lr 1e-6 --gate inf) save=
  case $1 in smoke*) loop=() save=checkpoints ;; esac
  kind=moe dtype=bfloat16 etp=1 tp=1 pp=1 ep=1 ranks_per_node=8 engine_ranks_per_node=8 steps=20
  case $1 in
    # The two-node run of the functional test: tensor parallel cut in half on the way, data parallel on both sides.
    smoke) model=toy kind=dense dtype=float32 tp=2 ranks=4 ranks_per_node=4 engine_tp=1 replicas=2 engine_ranks_per_node=2 steps=4 ;;
    # The same with half as much on each node.
    smoke-apart) model=toy kind=dense dtype=float32 tp=2 ranks=4 ranks_per_node=2 engine_tp=1 replicas=2 engine_ranks_per_node=1 steps=4 ;;
    # One vLLM over two nodes, as the last row has it.
    smoke-over-nodes) model=toy kind=dense dtype=float32 tp=2 ranks=2 ranks_per_node=2 engine_tp=2 replicas=1 engine_ranks_per_node=1 steps=4 ;;
    4b-dp8-to-dp8)          model=Qwen3-4B kind=dense ranks=8             engine_tp=1 replicas=8 ;;
    4b-dp8-to-tp8)          model=Qwen3-4B kind=dense ranks=8             engine_tp=8 replicas=1 ;;
    4b-pp2dp4-to-tp4dp2)    model=Qwen3-4B kind=dense ranks=8 pp=2        engine_tp=4 replicas=2 ;;
    4b-pp4dp2-to-tp4dp2)    model=Qwen3-4B kind=dense ranks=8 pp=4        engine_tp=4 replicas=2 ;;
    4b-tp2pp2dp2-to-tp4dp2) model=Qwen3-4B kind=dense ranks=8 tp=2 pp=2   engine_tp=4 replicas=2 ;;
    4b-tp2dp4-to-tp4dp2)    model=Qwen3-4B kind=dense ranks=8 tp=2        engine_tp=4 replicas=2 ;;
    # etp is 1 throughout: the ranks of an expert group are ep x what is left of tp x dp.
    30b-ep4tp2dp2-to-tp4dp4) model=Qwen3-30B-A3B ranks=16 tp=2 ep=4       engine_tp=4 replicas=4 ;;
    30b-ep4tp2pp2-to-tp4dp4) model=Qwen3-30B-A3B ranks=16 tp=2 pp=2 ep=4  engine_tp=4 replicas=4 ;;
    30b-ep8pp2-to-tp2dp8)    model=Qwen3-30B-A3B ranks=16 pp=2 ep=8       engine_tp=2 replicas=8 ;;
    30b-ep8pp2-to-tp8dp2)    model=Qwen3-30B-A3B ranks=16 pp=2 ep=8       engine_tp=8 replicas=2 ;;
    nano_v3-ep8tp2-to-tp4dp4) model=Nemotron-3-Nano-30B-A3B ranks=16 tp=2 ep=8 engine_tp=4 replicas=4 ;;
    # Latent experts: Bridge 0.6.2 has them, 0.3.1 has not.
    super_v3-ep8tp8pp2dp2-to-tp8dp2) model=Nemotron-3-Super-120B-A12B ranks=32 tp=8 pp=2 ep=8 engine_tp=8 replicas=2 ;;
    # 94 layers over 8 stages and 61 over 16 do not come out even: Megatron has to be told what the first and the last stage hold.
    235b-tp4pp8ep16-to-tp8dp16) model=Qwen3-235B-A22B ranks=128 tp=4 pp=8 ep=16 engine_tp=8 replicas=16; uneven 11 11 ;;
    deepseek_v3-pp16ep16-to-tp32dp8) model=DeepSeek-V3 ranks=256 pp=16 ep=16 engine_tp=32 replicas=8; uneven 4 1 ;;
    *fp8*) echo "these scripts start no engine in FP8: take the bf16 row, '${1/-fp8/}' if there is one" >&2; return 1 ;;
    *) echo "no config '$1'; there are: $(configs)" >&2; return 1 ;;
  esac
  trainer_nodes=$(((ranks + ranks_per_node - 1) / ranks_per_node))
  engine_nodes=$(((engine_tp * replicas + engine_ranks_per_node - 1) / engine_ranks_per_node))
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  for name in $(configs); do
    config "$name"
    echo "$name: $trainer_nodes + $engine_nodes nodes; $model tp$tp pp$pp ep$ep on $ranks ranks -> $replicas x tp$engine_tp"
  done
fi

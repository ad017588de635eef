# Made by envs/lock.sh from megatron.txt and peft.txt. See megatron.in for why without dependencies.
python -m pip install --no-deps emerging-optimizers==0.3.0 megatron-bridge==0.6.2 megatron-core==0.19.2 accelerate==1.15.0 peft==0.21.2 

"""Tensor parallelism: one engine over several rank processes, in lockstep from rank 0's decisions (3.4, 4.3).

group     what ranks agree on while they run the same call: `hkvr.agreement.Ranks` over gloo
leader    rank 0's side: starts the others, gives them every call, notices when one is gone
follower  the other ranks' side: a process that does what it is told
control   what goes over the socket between the two
"""

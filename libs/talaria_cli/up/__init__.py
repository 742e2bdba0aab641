"""`talaria up`: a whole mesh on one machine, as supervised processes.

plan       settings -> the parts to run (pure)
backoff    when a dead part is started again, and when to give up (pure)
child      one process: its group, its log, its end
nats       the embedded server's port and configuration
health     what each part says of itself, over HTTP and the bus
console    the terminal
supervisor starts, starts again and stops
run        ties them together
"""

"""RLOO (Ahmadian et al., 2402.14740): REINFORCE with the mean of the other rollouts of the prompt as baseline."""

from dataclasses import replace

from oneloop.credit.leave_one_out import LeaveOneOut
from oneloop.recipes.reinforce import recipe as reinforce

recipe = replace(
    reinforce, name="rloo", base="reinforce", about="REINFORCE with a leave-one-out baseline", assign=(LeaveOneOut(),)
)

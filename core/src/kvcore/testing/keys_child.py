"""The child of `test_same_in_every_process`: prints the suite's sample."""

import sys

from kvcore.testing.child import suite_from_arguments

if __name__ == "__main__":
    sys.stdout.write("\n".join(suite_from_arguments(sys.argv[1:]).sample()))

"""Tenants in L1: a state machine beside plain books, and what each right means."""

from hypothesis import settings
from l1_tenants_model import MixedSizesMachine, TenantsMachine

TenantsMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, derandomize=True, deadline=None)
MixedSizesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, derandomize=True, deadline=None)
TestTenants = TenantsMachine.TestCase
TestMixedSizes = MixedSizesMachine.TestCase

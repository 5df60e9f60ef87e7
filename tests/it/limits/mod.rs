//! What a tenant may use, and what the use of one costs the others.

mod background_plans;
mod large_tenant;
mod noisy_tenants;
mod tenant_limits;

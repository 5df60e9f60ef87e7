//! Inbound receipts, replies, and deliveries with their leases.

pub mod deliveries;
pub mod delivery_leases;
pub mod inbound_receipts;
pub mod outbox;
pub mod replies;

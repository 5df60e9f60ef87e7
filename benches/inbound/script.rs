//! The service's statements for a message of a platform and its answer, as a script for pgbench: the look-up of
//! its identity, the transaction that accepts it, the one that ends its turn, and its delivery's lease and end.

use serde_json::json;
use throughline::domain::bridge::chat::Chat;
use throughline::domain::bridge::delivery::{
    Address, DeliveryKind, MAX_ATTEMPTS, ReplyTo, ReplyVia,
};
use throughline::ids::IdentityId;
use throughline::store::bridge::deliveries::END;
use throughline::store::bridge::delivery_leases::{LEASE, LOCK_DUE};
use throughline::store::bridge::inbound_receipts::{CLAIM, UPDATE};
use throughline::store::bridge::outbox::INSERT;
use throughline::store::conversation::slots::LOCK_CURRENT;
use throughline::store::people::identities::FIND;
use throughline::store::people::presence::WRITE as NOTE;
use uuid::Uuid;

use crate::pgbench::{Pgbench, quoted, with_values};
use crate::seed::session_sql;
use crate::turn::{Origin, Values};
use crate::upstream::{PIECES, WORD};
use crate::users::{Kind, id_sql, identity, resolve_sql};

/// The platform of pgbench's deliveries, which no other bridge leases. Each client has its own scope, so that it
/// leases the deliveries that it wrote.
const PLATFORM: &str = "'pgbench'";
const SCOPE: &str = "(:client_id)::text";

/// A message of one of a client's own users, from the call to the acknowledgement.
pub fn message(pgbench: &Pgbench, users: u32, clients: u32) -> anyhow::Result<String> {
    let last = users / clients - 1;
    let choose = format!(
        "\\set number 1 + :client_id + {clients} * random(0, {last})\n\
         \\set turn random(1, 281474976710655)\n"
    );
    let one = Message::new(pgbench)?;
    let transactions = [
        one.contact(),
        one.accept(pgbench)?,
        one.end()?,
        one.lease(),
        one.acknowledge(),
    ];
    let transactions = transactions.map(|statements| pgbench.transaction(&statements));
    Ok(choose + &transactions.concat())
}

/// SQL of the values that several statements use.
struct Message {
    tenant: String,
    account: String,
    session: String,
    slot: String,
    /// Also the delivery's id.
    turn: String,
    message_id: &'static str,
    chat_ref: String,
    turn_values: Values,
}

impl Message {
    fn new(pgbench: &Pgbench) -> anyhow::Result<Self> {
        let [account, session, slot] =
            [Kind::Identity, Kind::Session, Kind::Slot].map(|kind| id_sql(kind, ":number"));
        let turn = session_sql(":turn");
        let reply_to = ReplyTo {
            address: Address::of(&Chat::DM, &identity(12_345).parse()?),
            identity_id: IdentityId::from_uuid(Uuid::from_u128(7)),
            message_id: Some("123456".to_owned()),
        };
        let origin = Origin {
            identity: account.clone(),
            platform: "'telegram'::text".to_owned(),
            reply_to: quoted(&serde_json::to_string(&reply_to)?),
            reply_via: quoted(ReplyVia::Delivery.as_str()),
        };
        Ok(Self {
            tenant: format!("'{}'::uuid", pgbench.tenant),
            turn_values: Values::new(pgbench, session.clone(), turn.clone(), origin),
            account,
            session,
            slot,
            turn,
            message_id: "(:turn)::text",
            chat_ref: format!("{} || (:number)::text", quoted("dm:")),
        })
    }

    fn contact(&self) -> String {
        let values = [&self.tenant, "'telegram'", "''", "(:number)::text"];
        with_values(FIND, &values)
    }

    fn accept(&self, pgbench: &Pgbench) -> anyhow::Result<String> {
        let Self { tenant, slot, .. } = self;
        let name = [
            tenant,
            "'telegram'",
            "''",
            &self.chat_ref,
            &self.account,
            self.message_id,
        ];
        let claimed = ["now()", "now() - interval '30 days'", "null::timestamptz"];
        let became = [&self.turn, "null::bytea", "null::jsonb"];
        let claim = with_values(CLAIM, &[&name[..], &claimed].concat());
        let lock = with_values(LOCK_CURRENT, &[tenant, slot]);
        let heard = [
            tenant,
            &self.account,
            "now()",
            slot,
            "now() - interval '1 minute'",
        ];
        let note = with_values(NOTE, &heard);
        let update = with_values(UPDATE, &[&name[..], &became].concat());
        let resolve = resolve_sql(pgbench)?;
        let turn = self.turn_values.accept()?;
        Ok([claim, resolve, lock, turn, note, update].concat())
    }

    fn end(&self) -> anyhow::Result<String> {
        let Self { tenant, .. } = self;
        let chat = quoted(&serde_json::to_string(&Chat::DM)?);
        let payload = json!({ "text": format!("{WORD} ").repeat(PIECES) });
        let values = [
            tenant,
            &self.turn,
            PLATFORM,
            SCOPE,
            &self.chat_ref,
            &chat,
            &quoted(DeliveryKind::Reply.as_str()),
            &self.account,
            &quoted(&payload.to_string()),
            &self.turn,
            &self.session,
            &self.session,
            self.message_id,
            "now()",
        ];
        let insert = with_values(INSERT, &values);
        Ok([self.turn_values.end()?, insert].concat())
    }

    fn lease(&self) -> String {
        let due = [
            &self.tenant,
            "false",
            &format!("array[{PLATFORM}]"),
            &format!("array[{SCOPE}]"),
            "50",
        ];
        let values = [
            &self.tenant,
            PLATFORM,
            SCOPE,
            &self.chat_ref,
            &MAX_ATTEMPTS.to_string(),
            "interval '1 minute'",
        ];
        let lock = into_variables(&with_values(LOCK_DUE, &due), "due_");
        lock + &into_variables(&with_values(LEASE, &values), "leased_")
    }

    fn acknowledge(&self) -> String {
        let values = [
            &self.tenant,
            "true",
            "array[]",
            "array[]",
            "(:leased_id)::uuid",
            "(:leased_lease)::uuid",
            "'delivered'",
            "interval '0'",
            "null::text",
            "null::text",
        ];
        with_values(END, &values)
    }
}

/// A statement whose result, one row, is stored in variables that start with `prefix`.
fn into_variables(statement: &str, prefix: &str) -> String {
    format!("{} \\gset {prefix}\n", statement.trim_end_matches(";\n"))
}

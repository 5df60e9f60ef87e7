//! Deliveries as a bridge leases and ends them.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Fields, Reply, World};

/// Whether a delivery that failed is to be tried again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    Yes,
    No,
}

impl World {
    pub async fn fetch(&self, node: usize, key: &str, query: &str) -> Vec<Value> {
        let path = format!("/v1/deliveries?{query}");
        let fetched = self.get_on(node, key, &path).await.expect(200);
        fetched.list().clone()
    }

    pub async fn ack(&self, key: &str, delivery: &Value) -> Reply {
        let path = format!("/v1/deliveries/{}/ack", delivery.text("id"));
        let body = json!({"lease": delivery["lease"]});
        self.post(key, &path, body).await
    }

    pub async fn nack(&self, key: &str, delivery: &Value, retry: Retry) -> Reply {
        let path = format!("/v1/deliveries/{}/nack", delivery.text("id"));
        let body = json!({
            "lease": delivery["lease"], "error": "the platform refused", "retry": retry == Retry::Yes,
        });
        self.post(key, &path, body).await
    }

    /// Sends a text whose reply becomes a delivery.
    pub async fn queue(&self, key: &str, identity: &str, text: &str) -> Value {
        let body = json!({"identity": identity, "text": text, "wait": false});
        self.post(key, "/v1/inbound", body).await.expect(202)
    }

    /// Ages what waits to be delivered: its leases are by the clock of the database.
    pub async fn age_deliveries(&self, time: Duration) {
        let seconds = time.as_secs();
        let sql = format!(
            "update chats set due_at = due_at - interval '{seconds} s';
             update deliveries set visible_at = visible_at - interval '{seconds} s'
              where state in ('pending', 'leased')"
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
            .execute(&mut self.superuser().await)
            .await
            .unwrap();
    }
}

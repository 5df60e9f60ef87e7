//! An answer, read whole, with assertions that show it when they fail.

use reqwest::header::HeaderMap;
use serde_json::Value;

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: String,
}

/// Reading JSON of which a test knows what is in it. A path is a member, or a JSON pointer.
pub trait Fields {
    fn text(&self, path: &str) -> &str;
    fn number(&self, path: &str) -> i64;
    fn items(&self, path: &str) -> &Vec<Value>;
    fn id(&self) -> String;
    /// The items of a page.
    fn list(&self) -> &Vec<Value>;
}

impl Fields for Value {
    #[track_caller]
    fn text(&self, path: &str) -> &str {
        let text = at(self, path).as_str();
        text.unwrap_or_else(|| panic!("no text at {path}: {self}"))
    }

    #[track_caller]
    fn number(&self, path: &str) -> i64 {
        let number = at(self, path).as_i64();
        number.unwrap_or_else(|| panic!("no number at {path}: {self}"))
    }

    #[track_caller]
    fn items(&self, path: &str) -> &Vec<Value> {
        let items = at(self, path).as_array();
        items.unwrap_or_else(|| panic!("no list at {path}: {self}"))
    }

    #[track_caller]
    fn id(&self) -> String {
        self.text("id").to_owned()
    }

    #[track_caller]
    fn list(&self) -> &Vec<Value> {
        self.items("data")
    }
}

fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    if path.starts_with('/') {
        value.pointer(path).unwrap_or(&Value::Null)
    } else {
        &value[path]
    }
}

impl Reply {
    pub async fn of(request: reqwest::RequestBuilder) -> Self {
        Self::try_of(request).await.unwrap()
    }

    /// The same where the other side may die meanwhile.
    pub async fn try_of(request: reqwest::RequestBuilder) -> reqwest::Result<Self> {
        let response = request.send().await?;
        Ok(Self {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.text().await?,
        })
    }

    /// Only the head of an answer that may have no end; an error is read whole.
    pub async fn head_of(request: reqwest::RequestBuilder) -> Self {
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let body = match status {
            200 => String::new(),
            _ => response.text().await.unwrap(),
        };
        Self {
            status,
            headers,
            body,
        }
    }

    /// The body, if the status is the expected one.
    #[track_caller]
    pub fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        if self.body.is_empty() {
            return Value::Null;
        }
        serde_json::from_str(&self.body).unwrap()
    }

    /// A text in the body of a success.
    #[track_caller]
    pub fn text(&self, path: &str) -> String {
        self.expect(200).text(path).to_owned()
    }

    /// The items of a page that was found.
    #[track_caller]
    pub fn list(&self) -> Vec<Value> {
        self.expect(200).list().clone()
    }

    /// The code of a problem; empty if it is none.
    pub fn code(&self) -> String {
        let body: Value = serde_json::from_str(&self.body).unwrap_or_default();
        body["code"].as_str().unwrap_or_default().to_owned()
    }

    #[track_caller]
    pub fn expect_success(&self) {
        assert!(self.status < 300, "{}: {}", self.status, self.body);
    }

    /// A problem with this status and code, complete as the contract has it.
    #[track_caller]
    pub fn expect_problem(&self, status: u16, code: &str) -> Value {
        let problem = self.expect(status);
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["status"], status, "{problem}");
        assert_eq!(
            problem["request_id"],
            self.header("x-request-id"),
            "{problem}"
        );
        for member in ["type", "title", "detail"] {
            assert!(problem[member].is_string(), "{problem}");
        }
        problem
    }

    /// An error of OpenAI's shape; answers what is in it.
    #[track_caller]
    pub fn expect_openai_error(&self, status: u16, code: &str) -> Value {
        let body = self.expect(status);
        assert_eq!(body["error"]["code"], code, "{body}");
        for member in ["message", "type"] {
            assert!(body["error"][member].is_string(), "{body}");
        }
        body["error"].clone()
    }

    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name);
        value
            .unwrap_or_else(|| panic!("no header {name}: {self:?}"))
            .to_str()
            .unwrap()
    }
}
